"""Each copy travels to its expert and back: an uneven all-to-all over ep, then a gather over the etp parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moefold.comm.async_collectives import (
    IDENTITY,
    async_all_gather_uneven,
    async_all_to_all,
    async_reduce_scatter_uneven,
)
from moefold.comm.collectives import all_gather, all_gather_uneven, all_to_all
from moefold.comm.groups import Group
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.dispatch.base import (
    Dispatcher,
    ExpertMigration,
    RoutingMap,
    SplitSizes,
    fp8_permuted_wire_format,
    fp8_wire_format,
)
from moefold.model.moe.permute import order_by_expert, permute, permute_probs, plan_permutation, reorder, unpermute
from moefold.ops.interface import Permutation, PermuteMap


@dataclass(frozen=True)
class AllToAllMetadata:
    """Row counts of every exchange, known before the first row moves."""

    permutation: Permutation
    probs_TK: Tensor | None
    """None where the experts have weighted the results."""
    tokens_per_expert: Sequence[int]
    input_splits: Sequence[int]
    """Rows that I send to each ep member."""
    output_splits: Sequence[int]
    """Rows that I receive from each ep member."""
    etp_splits: Sequence[int]
    """Rows that each etp member received, all of which every member works on."""
    expert_order: tuple[Tensor, Tensor] | None
    """How to sort the arrived rows by expert, and the inverse; None where they are sorted."""
    migration: ExpertMigration | None = None
    """Experts that compute away from home, whose rows lie behind those of this rank's experts."""


class AllToAllDispatcher(Dispatcher[AllToAllMetadata]):
    """All-to-all over ep, all-gather and reduce-scatter of uneven lengths over etp (arXiv:2504.14960).

    The ranks of ep and etp may be any ranks of attention: each holds tokens of its own. Zero rows anywhere are fine.

    Args:
        ep: ranks that hold different experts, and the same part of them.
        etp: ranks that hold different parts of the same experts.
        experts: all ep x etp ranks.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
        fp8_dispatch: whether rows travel to the experts in 8 bits.
    """

    def __init__(
        self,
        ep: Group,
        etp: Group,
        experts: Group,
        expert_coordinates: Sequence[tuple[int, int]],
        num_experts: int,
        *,
        fp8_dispatch: bool = False,
    ) -> None:
        self._ep = ep
        self._etp = etp
        self._experts = experts
        self._num_experts = num_experts
        self._fp8_dispatch = fp8_dispatch
        # Member of `experts` at each (ep, etp) coordinate.
        self._members = sorted(range(experts.size), key=lambda member: expert_coordinates[member])

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, AllToAllMetadata]:
        """Sort my copies by expert, and let all ranks know how many go where: one exchange of [E] counts."""
        permutation = plan_permutation(
            routing_map.ids_TK, self._num_experts, routing_map.kept_TK, routing_map.padded_capacity
        )
        counts = self._all_gather_counts(permutation, routing_map.padded_capacity)
        plan = self._build_metadata(permutation, routing_map.probs_TK, counts)
        # Packed rows are copied as bytes when they are sent: each token is rounded once, and less is copied.
        return x_TH if self._permutes_at_send else permute(x_TH, plan.permutation), plan

    @property
    def _permutes_at_send(self) -> bool:
        return self._fp8_dispatch and self._ep.size > 1

    def dispatch_communicate(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Send each row to the ep rank of its expert, then share it among the expert's etp parts."""
        return run_to_end(self.dispatch_async(rows, metadata))[0]

    def split_sizes(self, metadata: AllToAllMetadata) -> Sequence[SplitSizes]:
        """Rows over ep, then what arrived over etp."""
        mine = [metadata.etp_splits[self._etp.rank]] * self._etp.size
        return SplitSizes("ep", metadata.input_splits, metadata.output_splits), SplitSizes(
            "etp", mine, metadata.etp_splits
        )

    def dispatch_async(
        self, rows: Tensor, metadata: AllToAllMetadata, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Pauses while the rows travel over ep, and while they travel over etp."""
        form = fp8_permuted_wire_format(rows, metadata.permutation) if self._permutes_at_send else IDENTITY
        in_flight = async_all_to_all(rows, self._ep, metadata.input_splits, metadata.output_splits, form)
        computed = None if compute is None else compute()
        arrived = yield from in_flight.wait_resumable()
        form = fp8_wire_format(arrived) if self._fp8_dispatch else IDENTITY
        gathered = yield from async_all_gather_uneven(arrived, self._etp, metadata.etp_splits, form).wait_resumable()
        return gathered, computed

    def dispatch_postprocess(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Sort by expert; within one, by the source."""
        return rows if metadata.expert_order is None else reorder(rows, *metadata.expert_order)

    def permute_map(self, metadata: AllToAllMetadata) -> PermuteMap | None:
        """The order of the rows that arrived."""
        return None if metadata.expert_order is None else PermuteMap.from_order(*metadata.expert_order)

    def combine_preprocess(self, y_RH: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Back into the order of arrival."""
        return y_RH if metadata.expert_order is None else reorder(y_RH, *reversed(metadata.expert_order))

    def combine_communicate(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Add the etp parts of each result, then send it to where its token came from."""
        return run_to_end(self.combine_async(rows, metadata))

    def combine_async(self, rows: Tensor, metadata: AllToAllMetadata) -> Resumable[Tensor]:
        """Pauses while the etp parts travel, and while the results travel over ep."""
        added = yield from async_reduce_scatter_uneven(rows, self._etp, metadata.etp_splits).wait_resumable()
        return (
            yield from async_all_to_all(added, self._ep, metadata.output_splits, metadata.input_splits).wait_resumable()
        )

    def combine_postprocess(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Sum the copies of each token, weighted."""
        return unpermute(rows, metadata.permutation, metadata.probs_TK)

    def dispatch_probs(self, metadata: AllToAllMetadata) -> tuple[Tensor, AllToAllMetadata]:
        """The weights go the way of the rows: one exchange over ep and one gather over etp."""
        assert metadata.probs_TK is not None
        weights_R1 = permute_probs(metadata.probs_TK, metadata.permutation).unsqueeze(1)
        weights_R1 = all_to_all(weights_R1, self._ep, metadata.input_splits, metadata.output_splits)
        weights_R1 = all_gather_uneven(weights_R1, self._etp, metadata.etp_splits)
        return self.dispatch_postprocess(weights_R1, metadata).squeeze(1), replace(metadata, probs_TK=None)

    def _build_metadata(self, permutation: Permutation, probs_TK: Tensor, counts: Tensor) -> AllToAllMetadata:
        """The plan that follows from the counts of `_all_gather_counts`."""
        sent = counts[self._ep.rank, self._etp.rank]
        return self._metadata_from_counts(permutation, probs_TK, sent, counts[:, :, self._ep.rank])

    def _metadata_from_counts(
        self,
        permutation: Permutation,
        probs_TK: Tensor,
        sent: Tensor,
        arriving: Tensor,
        migration: ExpertMigration | None = None,
    ) -> AllToAllMetadata:
        """The plan that follows from what I send and get; counts are on the CPU.

        Args:
            permutation: of my copies, by the ep member they go to, then by the place of the expert there.
            probs_TK: weight of each copy.
            sent: rows that I send to each ep member, in any number of parts, [ep, parts].
            arriving: rows of each expert that I get, [ep source, etp source, experts that compute here].
            migration: the experts that change ranks.
        """
        arriving = arriving.transpose(0, 1)  # as they will lie
        order = None
        if arriving.shape[2] > 1 and self._experts.size > 1:
            device = probs_TK.device
            forth, back = order_by_expert(arriving.flatten(0, 1))
            order = forth.to(device, non_blocking=True), back.to(device, non_blocking=True)
        return AllToAllMetadata(
            permutation=permutation,
            probs_TK=probs_TK,
            tokens_per_expert=arriving.sum((0, 1)).tolist(),
            input_splits=sent.sum(1).tolist(),
            output_splits=arriving[self._etp.rank].sum(1).tolist(),
            etp_splits=arriving.sum((1, 2)).tolist(),
            expert_order=order,
            migration=migration,
        )

    def _all_gather_counts(self, permutation: Permutation, padded_capacity: int | None) -> Tensor:
        """Rows of each expert from each rank, int64 [ep source, etp source, ep, E/ep] on the CPU."""
        shape = (self._ep.size, self._etp.size, self._ep.size, -1)
        if padded_capacity is not None:
            return torch.full((self._experts.size * self._num_experts,), padded_capacity).view(shape)
        counts = all_gather(permutation.tokens_per_expert_E.unsqueeze(0), self._experts).cpu()
        return counts[self._members].view(shape)
