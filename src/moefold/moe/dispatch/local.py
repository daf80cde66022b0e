"""The dispatcher of one rank that holds all experts: the reference for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.moe.dispatch.base import Assignment, Dispatcher
from moefold.moe.permute import Permutation, permute, plan_permutation, row_weights, unpermute


@dataclass(frozen=True)
class LocalPlan:
    """Nothing travels: the permutation is the way."""

    permutation: Permutation
    probs_TK: Tensor | None
    rows_per_expert: Sequence[int]


class LocalDispatcher(Dispatcher[LocalPlan]):
    """Permutes by expert; communicates nothing."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def dispatch_preprocess(self, x_TH: Tensor, assignment: Assignment) -> tuple[Tensor, LocalPlan]:
        """Sort the copies by expert."""
        permutation = plan_permutation(assignment.ids_TK, self._num_experts, assignment.kept_TK, assignment.slots)
        if assignment.slots is None:
            rows_per_expert = permutation.rows_per_expert_E.tolist()
        else:
            rows_per_expert = [assignment.slots] * self._num_experts
        return permute(x_TH, permutation), LocalPlan(permutation, assignment.probs_TK, rows_per_expert)

    def dispatch_communicate(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Nothing to exchange."""
        return rows

    def dispatch_postprocess(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """They are sorted already."""
        return rows

    def combine_preprocess(self, y_RH: Tensor, plan: LocalPlan) -> Tensor:
        """Nothing to sort."""
        return y_RH

    def combine_communicate(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Nothing to exchange."""
        return rows

    def combine_postprocess(self, rows: Tensor, plan: LocalPlan) -> Tensor:
        """Sum the copies of each token, weighted."""
        return unpermute(rows, plan.permutation, plan.probs_TK)

    def take_weights(self, plan: LocalPlan) -> tuple[Tensor, LocalPlan]:
        """They are here already."""
        assert plan.probs_TK is not None
        return row_weights(plan.probs_TK, plan.permutation), replace(plan, probs_TK=None)
