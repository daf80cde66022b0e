"""The dispatcher of one rank that holds all experts: the reference for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.kernels.rows import Sorting
from moefold.moe.dispatch.base import Assignment, Dispatcher
from moefold.moe.permute import Permutation, as_counts, permute, plan_permutation, row_weights, unpermute
from moefold.precision.packed import round_as_packed


@dataclass(frozen=True)
class LocalPlan:
    """Nothing travels: the permutation is the way."""

    permutation: Permutation
    probs_TK: Tensor | None
    rows_per_expert: Sequence[int]


class LocalDispatcher(Dispatcher[LocalPlan]):
    """Permutes by expert; communicates nothing.

    Args:
        num_experts: E.
        packs: whether experts are given the rounded rows that other dispatchers would bring them.
    """

    sums_copies = True

    def __init__(self, num_experts: int, *, packs: bool = False) -> None:
        self._num_experts = num_experts
        self._packs = packs

    def dispatch_preprocess(self, x_TH: Tensor, assignment: Assignment) -> tuple[Tensor, LocalPlan]:
        """Decide how the copies are sorted."""
        permutation = plan_permutation(assignment.ids_TK, self._num_experts, assignment.kept_TK, assignment.slots)
        if assignment.slots is None:
            rows_per_expert = as_counts(permutation.rows_per_expert_E)
        else:
            rows_per_expert = [assignment.slots] * self._num_experts
        rows = round_as_packed(x_TH) if self._packs else x_TH
        return rows, LocalPlan(permutation, assignment.probs_TK, rows_per_expert)

    def dispatch_communicate(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Nothing to exchange."""
        return rows

    def dispatch_postprocess(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Sort the copies by expert."""
        return permute(rows, plan.permutation)

    def sorting(self, plan: LocalPlan) -> Sorting:
        """The permutation."""
        return Sorting.of(plan.permutation)

    def combine_preprocess(self, y_RH: Tensor, plan: LocalPlan) -> Tensor:
        """Sum the copies of each token, weighted."""
        return unpermute(y_RH, plan.permutation, plan.probs_TK)

    def combine_communicate(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Nothing to exchange."""
        return rows

    def combine_postprocess(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """They are sums already."""
        return rows

    def take_weights(self, plan: LocalPlan) -> tuple[Tensor, LocalPlan]:
        """They are here already."""
        assert plan.probs_TK is not None
        return row_weights(plan.probs_TK, plan.permutation), replace(plan, probs_TK=None)
