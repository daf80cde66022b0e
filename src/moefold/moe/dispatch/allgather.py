"""Every rank sees the tokens of all ranks and serves those that chose its experts: simple, best for small ep * etp."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.kernels.rows import Sorting
from moefold.model.steps import Steps, finish
from moefold.moe.dispatch.base import Assignment, Dispatcher
from moefold.moe.dispatch.exchange import Exchange
from moefold.moe.dispatch.packed_form import packed_rows
from moefold.moe.permute import Permutation, as_counts, permute, plan_permutation, row_weights, unpermute
from moefold.parallel.collectives import all_gather
from moefold.parallel.groups import Group
from moefold.parallel.in_flight import AS_IT_IS, start_all_gather, start_reduce_scatter


@dataclass(frozen=True)
class AllGatherPlan:
    """The permutation is over the tokens of all N ranks, with the copies for this rank's experts alone."""

    permutation: Permutation
    probs_TK: Tensor | None
    """Of all ranks, [N*T, K]; None where the experts have weighted the results."""
    rows_per_expert: Sequence[int]
    num_tokens: int
    """Of one rank, T."""


class AllGatherDispatcher(Dispatcher[AllGatherPlan]):
    """All-gather of tokens and reduce-scatter of results over ep x etp.

    Args:
        experts: the ep x etp ranks that hold all experts between them, each with equally many tokens.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
        packs: whether tokens travel to the experts in 8 bits.
    """

    sums_copies = True

    def __init__(
        self,
        experts: Group,
        expert_coordinates: Sequence[tuple[int, int]],
        num_experts: int,
        *,
        packs: bool = False,
    ) -> None:
        self._experts = experts
        self._packs = packs
        num_parts = 1 + max(ep for ep, _ in expert_coordinates)
        self._num_local = num_experts // num_parts
        self._first = expert_coordinates[experts.rank][0] * self._num_local

    def dispatch_preprocess(self, x_TH: Tensor, assignment: Assignment) -> tuple[Tensor, AllGatherPlan]:
        """Gather the routing of all ranks and pick the copies for my experts."""
        ids_TK = assignment.ids_TK
        if assignment.kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~assignment.kept_TK, -1)
        local_ids_TK = all_gather(ids_TK, self._experts) - self._first
        mine_TK = (local_ids_TK >= 0) & (local_ids_TK < self._num_local)
        slots = None if assignment.slots is None else assignment.slots * self._experts.size
        permutation = plan_permutation(local_ids_TK, self._num_local, mine_TK, slots)
        rows_per_expert = as_counts(permutation.rows_per_expert_E) if slots is None else [slots] * self._num_local
        # Each rank uses some of the weights and, under etp, sees a part of their gradient: the adjoint sums the parts.
        probs_TK = all_gather(assignment.probs_TK, self._experts)
        return x_TH, AllGatherPlan(permutation, probs_TK, rows_per_expert, len(x_TH))

    def dispatch_communicate(self, rows: Tensor, plan: AllGatherPlan) -> Tensor:
        """Gather the tokens of all ranks, [N*T, H]."""
        return finish(self.dispatch_steps(rows, plan))[0]

    def routing_exchanges(self, x_TH: Tensor) -> Sequence[Exchange]:
        """The routing of my tokens goes to all."""
        return (self._of_all(len(x_TH)),)

    def exchanges(self, plan: AllGatherPlan) -> Sequence[Exchange]:
        """My tokens go to all."""
        return (self._of_all(plan.num_tokens),)

    def _of_all(self, num_tokens: int) -> Exchange:
        counts = [num_tokens] * self._experts.size
        return Exchange("experts", counts, counts)

    def dispatch_steps(
        self, rows: Tensor, plan: AllGatherPlan, compute: Callable[[], Tensor] | None = None
    ) -> Steps[tuple[Tensor, Tensor | None]]:
        """Pauses while the tokens are gathered."""
        in_flight = start_all_gather(rows, self._experts, packed_rows(rows) if self._packs else AS_IT_IS)
        computed = None if compute is None else compute()
        return (yield from in_flight.landing()), computed

    def dispatch_postprocess(self, rows: Tensor, plan: AllGatherPlan) -> Tensor:
        """Take my experts' copies, sorted."""
        return permute(rows, plan.permutation)

    def sorting(self, plan: AllGatherPlan) -> Sorting:
        """The permutation."""
        return Sorting.of(plan.permutation)

    def combine_preprocess(self, y_RH: Tensor, plan: AllGatherPlan) -> Tensor:
        """My experts' part of the weighted sum for the tokens of all ranks, [N*T, H]."""
        return unpermute(y_RH, plan.permutation, plan.probs_TK)

    def combine_communicate(self, rows: Tensor, plan: AllGatherPlan) -> Tensor:
        """Add the parts of all ranks; each keeps its own tokens."""
        return finish(self.combine_steps(rows, plan))

    def combine_steps(self, rows: Tensor, plan: AllGatherPlan) -> Steps[Tensor]:
        """Pauses while the parts travel."""
        return (yield from start_reduce_scatter(rows, self._experts).landing())

    def combine_postprocess(self, rows: Tensor, plan: AllGatherPlan) -> Tensor:
        """They are home already."""
        return rows

    def take_weights(self, plan: AllGatherPlan) -> tuple[Tensor, AllGatherPlan]:
        """They are here already."""
        assert plan.probs_TK is not None
        return row_weights(plan.probs_TK, plan.permutation), replace(plan, probs_TK=None)
