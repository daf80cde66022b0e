"""A dispatcher that lets the ranks compare notes before each exchange: `faults.check_dispatch`.

Ranks that exchange rows and disagree on how many do not fail: they wait for each other for ever, or gloo aborts the
process. Here each rank first tells the others where it is and what it is about to send and receive, in a record of the
same size whatever the exchange, so that even ranks at different places understand each other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.errors import RunError
from moefold.kernels.rows import Sorting
from moefold.model.steps import Steps
from moefold.moe.dispatch.base import Assignment, Dispatcher, Loan
from moefold.moe.dispatch.exchange import Exchange
from moefold.parallel.collectives import all_gather
from moefold.parallel.groups import MoEGroups

PHASES = ("preprocess", "dispatch", "weights", "loan", "combine")
HEADER = ("step", "layer", "phase", "width")
"""What must be the same on all ranks; `width` is that of a row."""
OVER = ("ep", "etp", "experts")


class CheckedDispatcher(Dispatcher[Any]):
    """Another dispatcher, whose exchanges are compared first. The way back of the gradients follows from the way forth.

    Args:
        inner: does the work.
        groups: of the MoE view; the records go over ep x etp.
        layer: its number in the whole model.
        device: of the rows.
    """

    def __init__(self, inner: Dispatcher[Any], groups: MoEGroups, layer: int, device: torch.device) -> None:
        self.sums_copies = inner.sums_copies
        self._inner, self._experts, self._layer, self._device = inner, groups.experts, layer, device
        at = groups.expert_coordinates
        same = {"ep": lambda a, b: at[a][1] == at[b][1], "etp": lambda a, b: at[a][0] == at[b][0]}
        everyone = range(groups.experts.size)
        self._members = {
            over: [[b for b in everyone if over == "experts" or same[over](a, b)] for a in everyone] for over in OVER
        }
        """For each member of `experts`, those in its group of that name, in the order of the group."""

    def dispatch_preprocess(self, x_TH: Tensor, assignment: Assignment) -> tuple[Tensor, Any]:
        """As the inner one, which exchanges counts or routing here."""
        self._compare("preprocess", x_TH.shape[1], self._inner.routing_exchanges(x_TH))
        return self._inner.dispatch_preprocess(x_TH, assignment)

    def dispatch_communicate(self, rows: Tensor, plan: Any) -> Tensor:
        """As the inner one."""
        self._compare("dispatch", rows.shape[1], self._inner.exchanges(plan))
        return self._inner.dispatch_communicate(rows, plan)

    def dispatch_steps(
        self, rows: Tensor, plan: Any, compute: Callable[[], Tensor] | None = None
    ) -> Steps[tuple[Tensor, Tensor | None]]:
        """As the inner one."""
        self._compare("dispatch", rows.shape[1], self._inner.exchanges(plan))
        return (yield from self._inner.dispatch_steps(rows, plan, compute))

    def dispatch_postprocess(self, rows: Tensor, plan: Any) -> Tensor:
        """As the inner one."""
        return self._inner.dispatch_postprocess(rows, plan)

    def sorting(self, plan: Any) -> Sorting | None:
        """As the inner one."""
        return self._inner.sorting(plan)

    def combine_preprocess(self, y_RH: Tensor, plan: Any) -> Tensor:
        """As the inner one."""
        return self._inner.combine_preprocess(y_RH, plan)

    def combine_communicate(self, rows: Tensor, plan: Any) -> Tensor:
        """As the inner one."""
        self._compare_combine(rows, plan)
        return self._inner.combine_communicate(rows, plan)

    def combine_steps(self, rows: Tensor, plan: Any) -> Steps[Tensor]:
        """As the inner one."""
        self._compare_combine(rows, plan)
        return (yield from self._inner.combine_steps(rows, plan))

    def combine_postprocess(self, rows: Tensor, plan: Any) -> Tensor:
        """As the inner one."""
        return self._inner.combine_postprocess(rows, plan)

    def take_weights(self, plan: Any) -> tuple[Tensor, Any]:
        """As the inner one, for which the weights travel as the rows did, if at all."""
        self._compare("weights", 1, self._inner.exchanges(plan))
        return self._inner.take_weights(plan)

    def loan(self, plan: Any) -> Loan | None:
        """As the inner one."""
        loan = self._inner.loan(plan)
        if loan is not None:
            self._compare("loan", 0, [loan.rows()])
        return loan

    def _compare_combine(self, rows: Tensor, plan: Any) -> None:
        self._compare("combine", rows.shape[1], [exchange.back() for exchange in self._inner.exchanges(plan)])

    def _compare(self, phase: str, width: int, exchanges: Sequence[Exchange]) -> None:
        experts = self._experts
        record = [experts.record.step, self._layer, PHASES.index(phase), width]
        for over in OVER:
            rows = [0] * 2 * len(self._members[over][experts.rank])
            for exchange in exchanges:
                if exchange.over == over:
                    rows = [*exchange.send_rows, *exchange.receive_rows]
            record += rows
        told = all_gather(torch.tensor([record], device=self._device), experts).tolist()
        faults = [*self._different_places(told), *self._different_counts(told)]
        if faults:
            raise RunError(
                f"ranks disagree before the {phase} of layer {self._layer} in step {experts.record.step} "
                f"(faults.check_dispatch): {'; '.join(faults)}; nothing was sent"
            )

    def _different_counts(self, told: list[list[int]]) -> Iterator[str]:
        """What each rank would send to each other one must be what that one expects."""
        start, ranks = len(HEADER), self._experts.ranks
        for over, groups in self._members.items():
            size = len(groups[0])
            for source, members in enumerate(groups):
                for place, target in enumerate(members):
                    mine = members.index(source)
                    sent, expected = told[source][start + place], told[target][start + size + mine]
                    if sent != expected:
                        yield (
                            f"rank {ranks[source]} sends {sent} rows to rank {ranks[target]} over {over}, which "
                            f"expects {expected}"
                        )
            start += 2 * size

    def _different_places(self, told: list[list[int]]) -> Iterator[str]:
        """Ranks that are not where the first one is."""
        ranks = self._experts.ranks
        for rank, record in zip(ranks[1:], told[1:], strict=True):
            pairs = [(name, record[i], told[0][i]) for i, name in enumerate(HEADER) if record[i] != told[0][i]]
            if pairs:
                differs = ", ".join(
                    f"{name} {_show(name, its)} and not {_show(name, first)}" for name, its, first in pairs
                )
                yield f"rank {rank} is at {differs} as rank {ranks[0]}"


def _show(name: str, value: int) -> str:
    return PHASES[value] if name == "phase" else str(value)
