"""Each copy travels to its expert and back: an uneven all-to-all over ep, then a gather over the etp parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moefold.kernels.rows import Sorting
from moefold.model.steps import Steps, finish
from moefold.moe.dispatch.base import Assignment, Dispatcher, Loan
from moefold.moe.dispatch.exchange import Exchange
from moefold.moe.dispatch.packed_form import packed_copies, packed_rows
from moefold.moe.permute import Permutation, order_by_expert, permute, plan_permutation, reorder, row_weights, unpermute
from moefold.parallel.collectives import all_gather, all_gather_rows, all_to_all
from moefold.parallel.groups import Group
from moefold.parallel.in_flight import AS_IT_IS, start_all_gather_rows, start_all_to_all, start_reduce_scatter_rows


@dataclass(frozen=True)
class AllToAllPlan:
    """Row counts of every exchange, known before the first row moves."""

    permutation: Permutation
    probs_TK: Tensor | None
    """None where the experts have weighted the results."""
    rows_per_expert: Sequence[int]
    send_rows: Sequence[int]
    """Rows that I send to each ep member."""
    receive_rows: Sequence[int]
    """Rows that I receive from each ep member."""
    etp_rows: Sequence[int]
    """Rows that each etp member received, all of which every member works on."""
    order: tuple[Tensor, Tensor] | None
    """How to sort the arrived rows by expert, and the inverse; None where they are sorted."""
    loan: Loan | None = None
    """Experts that compute away from home, whose rows lie behind those of this rank's experts."""


class AllToAllDispatcher(Dispatcher[AllToAllPlan]):
    """All-to-all over ep, all-gather and reduce-scatter of uneven lengths over etp (arXiv:2504.14960).

    The ranks of ep and etp may be any ranks of attention: each holds tokens of its own. Zero rows anywhere are fine.

    Args:
        ep: ranks that hold different experts, and the same part of them.
        etp: ranks that hold different parts of the same experts.
        experts: all ep x etp ranks.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
        packs: whether rows travel to the experts in 8 bits.
    """

    def __init__(
        self,
        ep: Group,
        etp: Group,
        experts: Group,
        expert_coordinates: Sequence[tuple[int, int]],
        num_experts: int,
        *,
        packs: bool = False,
    ) -> None:
        self._ep, self._etp, self._experts = ep, etp, experts
        self._num_experts = num_experts
        self._packs = packs
        # Member of `experts` at each (ep, etp) coordinate.
        self._members = sorted(range(experts.size), key=lambda member: expert_coordinates[member])

    def dispatch_preprocess(self, x_TH: Tensor, assignment: Assignment) -> tuple[Tensor, AllToAllPlan]:
        """Sort my copies by expert, and let all ranks know how many go where: one exchange of [E] counts."""
        permutation = plan_permutation(assignment.ids_TK, self._num_experts, assignment.kept_TK, assignment.slots)
        counts = self._exchange_counts(permutation, assignment.slots)
        plan = self._plan(permutation, assignment.probs_TK, counts)
        # Packed rows are copied as bytes when they are sent: each token is rounded once, and less is copied.
        return x_TH if self._copies_late else permute(x_TH, plan.permutation), plan

    @property
    def _copies_late(self) -> bool:
        return self._packs and self._ep.size > 1

    def dispatch_communicate(self, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        """Send each row to the ep rank of its expert, then share it among the expert's etp parts."""
        return finish(self.dispatch_steps(rows, plan))[0]

    def exchanges(self, plan: AllToAllPlan) -> Sequence[Exchange]:
        """Rows over ep, then what arrived over etp."""
        mine = [plan.etp_rows[self._etp.rank]] * self._etp.size
        return Exchange("ep", plan.send_rows, plan.receive_rows), Exchange("etp", mine, plan.etp_rows)

    def dispatch_steps(
        self, rows: Tensor, plan: AllToAllPlan, compute: Callable[[], Tensor] | None = None
    ) -> Steps[tuple[Tensor, Tensor | None]]:
        """Pauses while the rows travel over ep, and while they travel over etp."""
        form = packed_copies(rows, plan.permutation) if self._copies_late else AS_IT_IS
        in_flight = start_all_to_all(rows, self._ep, plan.send_rows, plan.receive_rows, form)
        computed = None if compute is None else compute()
        arrived = yield from in_flight.landing()
        form = packed_rows(arrived) if self._packs else AS_IT_IS
        gathered = yield from start_all_gather_rows(arrived, self._etp, plan.etp_rows, form).landing()
        return gathered, computed

    def dispatch_postprocess(self, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        """Sort by expert; within one, by the source."""
        return rows if plan.order is None else reorder(rows, *plan.order)

    def sorting(self, plan: AllToAllPlan) -> Sorting | None:
        """The order of the rows that arrived."""
        return None if plan.order is None else Sorting.of_order(*plan.order)

    def combine_preprocess(self, y_RH: Tensor, plan: AllToAllPlan) -> Tensor:
        """Back into the order of arrival."""
        return y_RH if plan.order is None else reorder(y_RH, *reversed(plan.order))

    def combine_communicate(self, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        """Add the etp parts of each result, then send it to where its token came from."""
        return finish(self.combine_steps(rows, plan))

    def combine_steps(self, rows: Tensor, plan: AllToAllPlan) -> Steps[Tensor]:
        """Pauses while the etp parts travel, and while the results travel over ep."""
        added = yield from start_reduce_scatter_rows(rows, self._etp, plan.etp_rows).landing()
        return (yield from start_all_to_all(added, self._ep, plan.receive_rows, plan.send_rows).landing())

    def combine_postprocess(self, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        """Sum the copies of each token, weighted."""
        return unpermute(rows, plan.permutation, plan.probs_TK)

    def take_weights(self, plan: AllToAllPlan) -> tuple[Tensor, AllToAllPlan]:
        """The weights go the way of the rows: one exchange over ep and one gather over etp."""
        assert plan.probs_TK is not None
        weights_R1 = row_weights(plan.probs_TK, plan.permutation).unsqueeze(1)
        weights_R1 = all_to_all(weights_R1, self._ep, plan.send_rows, plan.receive_rows)
        weights_R1 = all_gather_rows(weights_R1, self._etp, plan.etp_rows)
        return self.dispatch_postprocess(weights_R1, plan).squeeze(1), replace(plan, probs_TK=None)

    def _plan(self, permutation: Permutation, probs_TK: Tensor, counts: Tensor) -> AllToAllPlan:
        """The plan that follows from the counts of `_exchange_counts`."""
        sent = counts[self._ep.rank, self._etp.rank]
        return self._plan_exchange(permutation, probs_TK, sent, counts[:, :, self._ep.rank])

    def _plan_exchange(
        self,
        permutation: Permutation,
        probs_TK: Tensor,
        sent: Tensor,
        arriving: Tensor,
        loan: Loan | None = None,
    ) -> AllToAllPlan:
        """The plan that follows from what I send and get; counts are on the CPU.

        Args:
            permutation: of my copies, by the ep member they go to, then by the place of the expert there.
            probs_TK: weight of each copy.
            sent: rows that I send to each ep member, in any number of parts, [ep, parts].
            arriving: rows of each expert that I get, [ep source, etp source, experts that compute here].
            loan: the experts that change ranks.
        """
        arriving = arriving.transpose(0, 1)  # as they will lie
        order = None
        if arriving.shape[2] > 1 and self._experts.size > 1:
            device = probs_TK.device
            forth, back = order_by_expert(arriving.flatten(0, 1))
            order = forth.to(device, non_blocking=True), back.to(device, non_blocking=True)
        return AllToAllPlan(
            permutation=permutation,
            probs_TK=probs_TK,
            rows_per_expert=arriving.sum((0, 1)).tolist(),
            send_rows=sent.sum(1).tolist(),
            receive_rows=arriving[self._etp.rank].sum(1).tolist(),
            etp_rows=arriving.sum((1, 2)).tolist(),
            order=order,
            loan=loan,
        )

    def _exchange_counts(self, permutation: Permutation, slots: int | None) -> Tensor:
        """Rows of each expert from each rank, int64 [ep source, etp source, ep, E/ep] on the CPU."""
        shape = (self._ep.size, self._etp.size, self._ep.size, -1)
        if slots is not None:
            return torch.full((self._experts.size * self._num_experts,), slots).view(shape)
        counts = all_gather(permutation.rows_per_expert_E.unsqueeze(0), self._experts).cpu()
        return counts[self._members].view(shape)
