"""All-to-all dispatcher: routed tokens over ep to their experts and back, with an all-gather over etp."""

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
from moefold.comm.collectives import all_gather, all_gather_uneven
from moefold.comm.groups import Group
from moefold.comm.host_copy import HostCopy
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.dispatch.base import (
    Dispatcher,
    ExpertMigration,
    RoutingMap,
    SplitSizes,
    fp8_permuted_wire_format,
    fp8_wire_format,
)
from moefold.model.moe.permute import (
    as_counts,
    order_by_expert,
    permute,
    permute_probs,
    plan_permutation,
    reorder,
    truncate_permutation,
    unpermute,
)
from moefold.ops.expert_ops import Permutation, PermuteMap


@dataclass(frozen=True)
class AllToAllMetadata:
    """Dispatch state of one micro-batch. All split sizes are known before tokens are sent."""

    permutation: Permutation
    probs_TK: Tensor | None
    """Routing probabilities, or None where the experts have applied them."""
    tokens_per_expert: Sequence[int]
    input_splits: Sequence[int]
    """Tokens sent to each ep member."""
    output_splits: Sequence[int]
    """Tokens received from each ep member."""
    etp_splits: Sequence[int]
    """Tokens that each etp member received. Every etp member computes all of them."""
    expert_order: tuple[Tensor, Tensor] | None
    """Permutation of the received tokens by expert, and its inverse, or None where they are sorted."""
    migration: ExpertMigration | None = None
    """Migrated experts. Tokens of received experts follow the tokens of this rank's experts."""


class AllToAllDispatcher(Dispatcher[AllToAllMetadata]):
    """Dispatcher with an all-to-all over ep, and all-gather and reduce-scatter over etp (arXiv:2504.14960).

    Split sizes are uneven and may be 0. The ep and etp groups are independent of the attention's groups: each rank has
    its own tokens.

    Args:
        ep: ranks that hold different experts, with the same shard of F.
        etp: ranks that hold different shards of the same experts.
        experts: all ep x etp ranks.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
    """

    takes_any_tokens = True
    _permutes_before_wait = True
    """True if the rows to send are known before the split sizes."""

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
        self._members = torch.tensor(
            sorted(range(experts.size), key=lambda member: expert_coordinates[member]), device="cpu"
        )

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, AllToAllMetadata]:
        """Permute the tokens by expert. It all-gathers the counts [E] of all ranks, and waits once for split sizes."""
        padded_capacity = routing_map.padded_capacity
        ids_TK = routing_map.ids_TK
        permutation = plan_permutation(
            ids_TK, self._num_experts, routing_map.kept_TK, padded_capacity, num_rows=ids_TK.numel()
        )
        if padded_capacity is None:
            counts = self._all_gather_counts(permutation)
            sizes = HostCopy(self._host_sizes(self.host_counts(counts)))
        else:
            counts = self._padded_counts(padded_capacity, x_TH.device)
            sizes = HostCopy(self._host_sizes(self._padded_counts(padded_capacity, torch.device("cpu"))))
        permuted = None
        if self._permutes_before_wait and not self._permutes_at_send:
            # The device permutes while the host waits for the sizes.
            permuted = self.permute_ops.permute(x_TH.detach(), permutation)
        metadata = self._build_metadata(permutation, routing_map.probs_TK, counts, sizes.wait())
        if self._permutes_at_send:
            # FP8 tokens are permuted as bytes when they are sent: each token is quantised once, and fewer bytes are
            # copied.
            return x_TH, metadata
        if permuted is not None:
            permuted = permuted[: len(metadata.permutation.token_R)]
        return permute(x_TH, metadata.permutation, self.permute_ops, permuted), metadata

    @property
    def _permutes_at_send(self) -> bool:
        return self._fp8_dispatch and self._ep.size > 1

    def dispatch_communicate(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Send each token to the ep rank of its expert, then all-gather over etp."""
        return run_to_end(self.dispatch_async(rows, metadata))[0]

    def split_sizes(self, metadata: AllToAllMetadata) -> Sequence[SplitSizes]:
        """Return the split sizes over ep, then the split sizes over etp."""
        etp_input_splits = [metadata.etp_splits[self._etp.rank]] * self._etp.size
        return SplitSizes("ep", metadata.input_splits, metadata.output_splits), SplitSizes(
            "etp", etp_input_splits, metadata.etp_splits
        )

    def dispatch_async(
        self, rows: Tensor, metadata: AllToAllMetadata, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Send the tokens, yielding during the all-to-all over ep and during the all-gather over etp."""
        wire_format = (
            fp8_permuted_wire_format(rows, metadata.permutation, self.permute_ops)
            if self._permutes_at_send
            else IDENTITY
        )
        async_result = async_all_to_all(rows, self._ep, metadata.input_splits, metadata.output_splits, wire_format)
        computed = None if compute is None else compute()
        received = yield from async_result.wait_resumable()
        wire_format = fp8_wire_format(received, self.permute_ops) if self._fp8_dispatch else IDENTITY
        gathered = yield from async_all_gather_uneven(
            received, self._etp, metadata.etp_splits, wire_format
        ).wait_resumable()
        return gathered, computed

    def dispatch_postprocess(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Sort the received tokens by expert, and within an expert by source."""
        return rows if metadata.expert_order is None else reorder(rows, *metadata.expert_order)

    def permute_map(self, metadata: AllToAllMetadata) -> PermuteMap | None:
        """Return the permutation of the received tokens."""
        return None if metadata.expert_order is None else PermuteMap.from_order(*metadata.expert_order)

    def combine_preprocess(self, y_RH: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Return the rows to the order of arrival."""
        return y_RH if metadata.expert_order is None else reorder(y_RH, *reversed(metadata.expert_order))

    def combine_communicate(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Reduce-scatter the partial outputs over etp, then send them back over ep."""
        return run_to_end(self.combine_async(rows, metadata))

    def combine_async(self, rows: Tensor, metadata: AllToAllMetadata) -> Resumable[Tensor]:
        """Send the outputs back, yielding during the reduce-scatter over etp and during the all-to-all over ep."""
        reduced = yield from async_reduce_scatter_uneven(rows, self._etp, metadata.etp_splits).wait_resumable()
        return (
            yield from async_all_to_all(
                reduced, self._ep, metadata.output_splits, metadata.input_splits
            ).wait_resumable()
        )

    def combine_postprocess(self, rows: Tensor, metadata: AllToAllMetadata) -> Tensor:
        """Compute the weighted sum of each token's expert outputs."""
        return unpermute(rows, metadata.permutation, metadata.probs_TK, self.permute_ops)

    def dispatch_probs(self, metadata: AllToAllMetadata) -> tuple[Tensor, AllToAllMetadata]:
        """Send the probabilities like the tokens: one all-to-all over ep and one all-gather over etp."""
        return run_to_end(self.dispatch_probs_async(metadata))

    def dispatch_probs_async(self, metadata: AllToAllMetadata) -> Resumable[tuple[Tensor, AllToAllMetadata]]:
        """Send the probabilities, yielding during the all-to-all over ep."""
        assert metadata.probs_TK is not None
        probs_R1 = permute_probs(metadata.probs_TK, metadata.permutation).unsqueeze(1)
        # The tokens' all-to-all resumes an overlapped forward pass.
        async_result = async_all_to_all(
            probs_R1, self._ep, metadata.input_splits, metadata.output_splits, resumes_forward=False
        )
        yield
        probs_R1 = all_gather_uneven(async_result.wait(), self._etp, metadata.etp_splits)
        return self.dispatch_postprocess(probs_R1, metadata).squeeze(1), replace(metadata, probs_TK=None)

    def _host_sizes(self, counts: Tensor) -> Tensor:
        """Return the numbers that `_build_metadata` reads on the host, on the device of the counts."""
        return self._sizes(counts[self._ep.rank, self._etp.rank], self._received(counts))

    def _received(self, counts: Tensor) -> Tensor:
        """Return the tokens received for each local expert, [etp source, ep source, E/ep], the order of the gather."""
        return counts[:, :, self._ep.rank].transpose(0, 1)

    @staticmethod
    def _sizes(sent_counts: Tensor, received: Tensor) -> Tensor:
        """Return the tokens sent to each ep member, received from each source, and of each expert, in one tensor.

        Args:
            sent_counts: tokens sent to each ep member, in any number of parts, [ep, parts].
            received: tokens received for each expert, [etp source, ep source, experts computed here].
        """
        return torch.cat((sent_counts.sum(1), received.sum(2).flatten(), received.sum((0, 1))))

    def _build_metadata(
        self, permutation: Permutation, probs_TK: Tensor, counts: Tensor, host_sizes: Tensor
    ) -> AllToAllMetadata:
        """Compute the metadata from the counts of all ranks, and the result of `_host_sizes` for them."""
        return self._metadata_from_sizes(permutation, probs_TK, self._received(counts), host_sizes)

    def _metadata_from_sizes(
        self,
        permutation: Permutation,
        probs_TK: Tensor,
        received: Tensor,
        sizes: Tensor,
        migration: ExpertMigration | None = None,
    ) -> AllToAllMetadata:
        """Compute the metadata. Nothing waits for the device.

        Args:
            permutation: permutation of this rank's routed tokens, by destination ep member, then by expert there.
            probs_TK: routing probabilities.
            received: as in `_sizes`, on the device.
            sizes: result of `_sizes`, on the host.
        """
        num_sources = self._etp.size * self._ep.size
        input_splits, by_source, by_expert = sizes.split([self._ep.size, num_sources, received.shape[2]])
        received_EP = by_source.view(self._etp.size, self._ep.size)
        is_sorted = received.shape[2] == 1 or self._experts.size == 1
        return AllToAllMetadata(
            permutation=truncate_permutation(permutation, int(input_splits.sum())),
            probs_TK=probs_TK,
            tokens_per_expert=as_counts(received.sum((0, 1)), by_expert.tolist()),
            input_splits=input_splits.tolist(),
            output_splits=received_EP[self._etp.rank].tolist(),
            etp_splits=received_EP.sum(1).tolist(),
            expert_order=None if is_sorted else order_by_expert(received.flatten(0, 1), int(by_source.sum())),
            migration=migration,
        )

    def _all_gather_counts(self, permutation: Permutation) -> Tensor:
        """Gather the tokens of each expert from each rank, int64 [ep source, etp source, ep, E/ep] on the device."""
        counts = all_gather(permutation.tokens_per_expert_E.unsqueeze(0), self._experts)
        if self._members.device != counts.device:
            self._members = self._members.to(counts.device)
        return self._by_destination(counts[self._members])

    def _padded_counts(self, padded_capacity: int, device: torch.device) -> Tensor:
        """Return the counts of padded experts in the form of `_all_gather_counts`."""
        return self._by_destination(torch.full((self._experts.size, self._num_experts), padded_capacity, device=device))

    def _by_destination(self, counts_SE: Tensor) -> Tensor:
        return counts_SE.view(self._ep.size, self._etp.size, self._ep.size, -1)
