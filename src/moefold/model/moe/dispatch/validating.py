"""A dispatcher that lets the ranks compare notes before each exchange: `faults.check_dispatch`.

Ranks that exchange rows and disagree on how many do not fail: they wait for each other for ever, or gloo aborts the
process. Here each rank first tells the others where it is and what it is about to send and receive, in a record of the
same size whatever the exchange, so that even ranks at different places understand each other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather
from moefold.comm.groups import MoEGroups
from moefold.comm.resumable import Resumable
from moefold.errors import RunError
from moefold.model.moe.dispatch.base import Dispatcher, ExpertMigration, RoutingMap, SplitSizes
from moefold.ops.interface import PermuteMap

PHASES = ("preprocess", "dispatch", "weights", "loan", "combine")
HEADER = ("step", "layer", "phase", "width")
"""What must be the same on all ranks; `width` is that of a row."""
GROUP_NAMES = ("ep", "etp", "experts")


class ValidatingDispatcher(Dispatcher[Any]):
    """Another dispatcher, whose exchanges are compared first. The way back of the gradients follows from the way forth.

    Args:
        inner: does the work.
        groups: of the MoE view; the records go over ep x etp.
        layer: its number in the whole model.
        device: of the rows.
    """

    def __init__(self, inner: Dispatcher[Any], groups: MoEGroups, layer: int, device: torch.device) -> None:
        self.combines_locally = inner.combines_locally
        self._inner = inner
        self._experts = groups.experts
        self._layer = layer
        self._device = device
        at = groups.expert_coordinates
        same = {"ep": lambda a, b: at[a][1] == at[b][1], "etp": lambda a, b: at[a][0] == at[b][0]}
        everyone = range(groups.experts.size)
        self._members = {
            over: [[b for b in everyone if over == "experts" or same[over](a, b)] for a in everyone]
            for over in GROUP_NAMES
        }
        """For each member of `experts`, those in its group of that name, in the order of the group."""

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Any]:
        """As the inner one, which exchanges counts or routing here."""
        self._compare("preprocess", x_TH.shape[1], self._inner.routing_split_sizes(x_TH))
        return self._inner.dispatch_preprocess(x_TH, routing_map)

    def dispatch_communicate(self, rows: Tensor, metadata: Any) -> Tensor:
        """As the inner one."""
        self._compare("dispatch", rows.shape[1], self._inner.split_sizes(metadata))
        return self._inner.dispatch_communicate(rows, metadata)

    def dispatch_async(
        self, rows: Tensor, metadata: Any, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """As the inner one."""
        self._compare("dispatch", rows.shape[1], self._inner.split_sizes(metadata))
        return (yield from self._inner.dispatch_async(rows, metadata, compute))

    def dispatch_postprocess(self, rows: Tensor, metadata: Any) -> Tensor:
        """As the inner one."""
        return self._inner.dispatch_postprocess(rows, metadata)

    def permute_map(self, metadata: Any) -> PermuteMap | None:
        """As the inner one."""
        return self._inner.permute_map(metadata)

    def combine_preprocess(self, y_RH: Tensor, metadata: Any) -> Tensor:
        """As the inner one."""
        return self._inner.combine_preprocess(y_RH, metadata)

    def combine_communicate(self, rows: Tensor, metadata: Any) -> Tensor:
        """As the inner one."""
        self._compare_combine(rows, metadata)
        return self._inner.combine_communicate(rows, metadata)

    def combine_async(self, rows: Tensor, metadata: Any) -> Resumable[Tensor]:
        """As the inner one."""
        self._compare_combine(rows, metadata)
        return (yield from self._inner.combine_async(rows, metadata))

    def combine_postprocess(self, rows: Tensor, metadata: Any) -> Tensor:
        """As the inner one."""
        return self._inner.combine_postprocess(rows, metadata)

    def dispatch_probs(self, metadata: Any) -> tuple[Tensor, Any]:
        """As the inner one, for which the weights travel as the rows did, if at all."""
        self._compare("weights", 1, self._inner.split_sizes(metadata))
        return self._inner.dispatch_probs(metadata)

    def migration(self, metadata: Any) -> ExpertMigration | None:
        """As the inner one."""
        loan = self._inner.migration(metadata)
        if loan is not None:
            self._compare("loan", 0, [loan.split_sizes()])
        return loan

    def _compare_combine(self, rows: Tensor, metadata: Any) -> None:
        self._compare("combine", rows.shape[1], [exchange.reversed() for exchange in self._inner.split_sizes(metadata)])

    def _compare(self, phase: str, width: int, split_sizes: Sequence[SplitSizes]) -> None:
        experts = self._experts
        record = [experts.recorder.step, self._layer, PHASES.index(phase), width]
        for over in GROUP_NAMES:
            rows = [0] * 2 * len(self._members[over][experts.rank])
            for exchange in split_sizes:
                if exchange.group_name == over:
                    rows = [*exchange.input_splits, *exchange.output_splits]
            record += rows
        told = all_gather(torch.tensor([record], device=self._device), experts).tolist()
        faults = [*self._position_mismatches(told), *self._count_mismatches(told)]
        if faults:
            raise RunError(
                f"ranks disagree before the {phase} of layer {self._layer} in step {experts.recorder.step} "
                f"(faults.check_dispatch): {'; '.join(faults)}; nothing was sent"
            )

    def _count_mismatches(self, records: list[list[int]]) -> Iterator[str]:
        """What each rank would send to each other one must be what that one expects."""
        start = len(HEADER)
        ranks = self._experts.ranks
        for over, groups in self._members.items():
            size = len(groups[0])
            for source, members in enumerate(groups):
                for place, target in enumerate(members):
                    mine = members.index(source)
                    sent = records[source][start + place]
                    expected = records[target][start + size + mine]
                    if sent != expected:
                        yield (
                            f"rank {ranks[source]} sends {sent} rows to rank {ranks[target]} over {over}, which "
                            f"expects {expected}"
                        )
            start += 2 * size

    def _position_mismatches(self, records: list[list[int]]) -> Iterator[str]:
        """Ranks that are not where the first one is."""
        ranks = self._experts.ranks
        for rank, record in zip(ranks[1:], records[1:], strict=True):
            pairs = [(name, record[i], records[0][i]) for i, name in enumerate(HEADER) if record[i] != records[0][i]]
            if pairs:
                differs = ", ".join(
                    f"{name} {_format_field(name, its)} and not {_format_field(name, first)}"
                    for name, its, first in pairs
                )
                yield f"rank {rank} is at {differs} as rank {ranks[0]}"


def _format_field(name: str, value: int) -> str:
    return PHASES[value] if name == "phase" else str(value)
