"""Dispatcher that compares split sizes across ranks before each collective: `faults.check_dispatch`.

Ranks whose split sizes disagree do not fail: they hang, or gloo aborts the process. Here each rank first all-gathers
its position and split sizes in a record of fixed size, so that the comparison works even between ranks at different
phases.
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
from moefold.ops.expert_ops import PermuteMap
from moefold.ops.permute import PermuteOps

PHASES = ("preprocess", "dispatch", "probs", "migration", "combine")
HEADER = ("step", "layer", "phase", "width")
"""Fields that must be equal on all ranks. `width` is the width of a row."""
GROUP_NAMES = ("ep", "etp", "experts")


class ValidatingDispatcher(Dispatcher[Any]):
    """Wrapper that validates another dispatcher's collectives.

    Collectives of the backward pass follow from the forward pass.

    Args:
        groups: groups of the MoE view. Records are gathered over ep x etp.
    """

    def __init__(self, inner: Dispatcher[Any], groups: MoEGroups, layer: int, device: torch.device) -> None:
        self.combines_locally = inner.combines_locally
        self._inner = inner
        self._experts = groups.experts
        self._layer = layer
        self._device = device
        coordinates = groups.expert_coordinates
        is_same_group = {
            "ep": lambda a, b: coordinates[a][1] == coordinates[b][1],
            "etp": lambda a, b: coordinates[a][0] == coordinates[b][0],
        }
        all_members = range(groups.experts.size)
        self._members = {
            group_name: [
                [b for b in all_members if group_name == "experts" or is_same_group[group_name](a, b)]
                for a in all_members
            ]
            for group_name in GROUP_NAMES
        }
        """For each member of `experts`: the members of its groups by name, in the order of the group."""

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Any]:
        """See base class."""
        self._compare("preprocess", x_TH.shape[1], self._inner.routing_split_sizes(x_TH))
        return self._inner.dispatch_preprocess(x_TH, routing_map)

    def dispatch_communicate(self, rows: Tensor, metadata: Any) -> Tensor:
        """See base class."""
        self._compare("dispatch", rows.shape[1], self._inner.split_sizes(metadata))
        return self._inner.dispatch_communicate(rows, metadata)

    def dispatch_async(
        self, rows: Tensor, metadata: Any, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """See base class."""
        self._compare("dispatch", rows.shape[1], self._inner.split_sizes(metadata))
        return (yield from self._inner.dispatch_async(rows, metadata, compute))

    def dispatch_postprocess(self, rows: Tensor, metadata: Any) -> Tensor:
        """See base class."""
        return self._inner.dispatch_postprocess(rows, metadata)

    def permute_map(self, metadata: Any) -> PermuteMap | None:
        """See base class."""
        return self._inner.permute_map(metadata)

    def combine_preprocess(self, y_RH: Tensor, metadata: Any) -> Tensor:
        """See base class."""
        return self._inner.combine_preprocess(y_RH, metadata)

    def combine_communicate(self, rows: Tensor, metadata: Any) -> Tensor:
        """See base class."""
        self._compare_combine(rows, metadata)
        return self._inner.combine_communicate(rows, metadata)

    def combine_async(self, rows: Tensor, metadata: Any) -> Resumable[Tensor]:
        """See base class."""
        self._compare_combine(rows, metadata)
        return (yield from self._inner.combine_async(rows, metadata))

    def combine_postprocess(self, rows: Tensor, metadata: Any) -> Tensor:
        """See base class."""
        return self._inner.combine_postprocess(rows, metadata)

    def dispatch_probs(self, metadata: Any) -> tuple[Tensor, Any]:
        """See base class. The collectives are the same as in `dispatch_communicate`, if any."""
        self._compare("probs", 1, self._inner.split_sizes(metadata))
        return self._inner.dispatch_probs(metadata)

    def dispatch_probs_async(self, metadata: Any) -> Resumable[tuple[Tensor, Any]]:
        """See base class."""
        self._compare("probs", 1, self._inner.split_sizes(metadata))
        return (yield from self._inner.dispatch_probs_async(metadata))

    def use_permute_ops(self, ops: PermuteOps) -> None:
        """See base class."""
        self._inner.use_permute_ops(ops)

    def take_receive_load(self) -> Tensor | None:
        """See base class."""
        return self._inner.take_receive_load()

    def migration(self, metadata: Any) -> ExpertMigration | None:
        """See base class."""
        migration = self._inner.migration(metadata)
        if migration is not None:
            self._compare("migration", 0, [migration.split_sizes()])
        return migration

    def _compare_combine(self, rows: Tensor, metadata: Any) -> None:
        self._compare("combine", rows.shape[1], [sizes.reversed() for sizes in self._inner.split_sizes(metadata)])

    def _compare(self, phase: str, width: int, split_sizes: Sequence[SplitSizes]) -> None:
        experts = self._experts
        record = [experts.recorder.step, self._layer, PHASES.index(phase), width]
        for group_name in GROUP_NAMES:
            rows = [0] * 2 * len(self._members[group_name][experts.rank])
            for sizes in split_sizes:
                if sizes.group_name == group_name:
                    rows = [*sizes.input_splits, *sizes.output_splits]
            record += rows
        records = all_gather(torch.tensor([record], device=self._device), experts).tolist()
        mismatches = [*self._position_mismatches(records), *self._count_mismatches(records)]
        if mismatches:
            raise RunError(
                f"ranks disagree before the {phase} of layer {self._layer} in step {experts.recorder.step} "
                f"(faults.check_dispatch): {'; '.join(mismatches)}; nothing was sent"
            )

    def _count_mismatches(self, records: list[list[int]]) -> Iterator[str]:
        """Yield the pairs of ranks whose sent and expected row counts differ."""
        start = len(HEADER)
        ranks = self._experts.ranks
        for group_name, groups in self._members.items():
            size = len(groups[0])
            for source, members in enumerate(groups):
                for place, target in enumerate(members):
                    member = members.index(source)
                    count = records[source][start + place]
                    expected = records[target][start + size + member]
                    if count != expected:
                        yield (
                            f"rank {ranks[source]} sends {count} rows to rank {ranks[target]} over {group_name}, which "
                            f"expects {expected}"
                        )
            start += 2 * size

    def _position_mismatches(self, records: list[list[int]]) -> Iterator[str]:
        """Yield the ranks that are not at the same step, layer and phase as the first rank."""
        ranks = self._experts.ranks
        for rank, record in zip(ranks[1:], records[1:], strict=True):
            pairs = [(name, record[i], records[0][i]) for i, name in enumerate(HEADER) if record[i] != records[0][i]]
            if pairs:
                differs = ", ".join(
                    f"{name} {_format_field(name, value)} and not {_format_field(name, first)}"
                    for name, value, first in pairs
                )
                yield f"rank {rank} is at {differs} as rank {ranks[0]}"


def _format_field(name: str, value: int) -> str:
    return PHASES[value] if name == "phase" else str(value)
