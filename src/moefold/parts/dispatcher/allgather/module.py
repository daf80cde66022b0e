"""All-gather dispatcher: every rank gets the tokens of all ranks. It is simple, and best for small ep * etp."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moefold.comm.async_collectives import IDENTITY, async_all_gather, async_reduce_scatter
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.dispatch.base import RoutingMap, SplitSizes, fp8_wire_format
from moefold.model.moe.dispatch.partial_sums import DispatchState, PartialSumDispatcher, ReceivedTokens
from moefold.model.moe.permute import as_counts, plan_permutation


@dataclass
class AllGatherMetadata(DispatchState):
    """Dispatch state of one micro-batch. This rank receives the tokens of all N ranks, [N*T, H]."""

    num_tokens: int
    """Tokens of one rank, T."""


class AllGatherDispatcher(PartialSumDispatcher[AllGatherMetadata]):
    """Dispatcher with an all-gather of tokens and a reduce-scatter of expert outputs over ep x etp.

    Args:
        experts: the ep x etp ranks that together hold all experts. Each has the same number of tokens.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
    """

    def __init__(
        self,
        experts: Group,
        expert_coordinates: Sequence[tuple[int, int]],
        num_experts: int,
        *,
        fp8_dispatch: bool = False,
    ) -> None:
        self._experts = experts
        self._fp8_dispatch = fp8_dispatch
        ep_size = 1 + max(ep for ep, _ in expert_coordinates)
        self._num_local = num_experts // ep_size
        self._first_expert = expert_coordinates[experts.rank][0] * self._num_local

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, AllGatherMetadata]:
        """Gather the routing of all ranks and select the tokens routed to this rank's experts."""
        ids_TK = routing_map.ids_TK
        if routing_map.kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~routing_map.kept_TK, -1)
        local_ids_TK = all_gather(ids_TK, self._experts) - self._first_expert
        is_local_TK = (local_ids_TK >= 0) & (local_ids_TK < self._num_local)
        padded_capacity = (
            None if routing_map.padded_capacity is None else routing_map.padded_capacity * self._experts.size
        )
        permutation = plan_permutation(local_ids_TK, self._num_local, is_local_TK, padded_capacity)
        tokens_per_expert = (
            as_counts(permutation.tokens_per_expert_E)
            if padded_capacity is None
            else [padded_capacity] * self._num_local
        )
        # Each rank uses some of the probabilities, and etp ranks compute partial gradients: the adjoint sums them.
        probs_TK = all_gather(routing_map.probs_TK, self._experts)
        received = ReceivedTokens(permutation, probs_TK, tokens_per_expert)
        return x_TH, AllGatherMetadata(len(x_TH), arrived=received)

    def dispatch_communicate(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """Gather the tokens of all ranks, [N*T, H]."""
        return run_to_end(self.dispatch_async(rows, metadata))[0]

    def routing_split_sizes(self, x_TH: Tensor) -> Sequence[SplitSizes]:
        """Return equal splits: the routing goes to all ranks."""
        return (self._equal_splits(len(x_TH)),)

    def split_sizes(self, metadata: AllGatherMetadata) -> Sequence[SplitSizes]:
        """Return equal splits: the tokens go to all ranks."""
        return (self._equal_splits(metadata.num_tokens),)

    def _equal_splits(self, num_tokens: int) -> SplitSizes:
        counts = [num_tokens] * self._experts.size
        return SplitSizes("experts", counts, counts)

    def dispatch_async(
        self, rows: Tensor, metadata: AllGatherMetadata, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Gather the tokens of all ranks, yielding during the all-gather."""
        wire_format = fp8_wire_format(rows, self.permute_ops) if self._fp8_dispatch else IDENTITY
        async_result = async_all_gather(rows, self._experts, wire_format)
        computed = None if compute is None else compute()
        return (yield from async_result.wait_resumable()), computed

    def combine_communicate(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """Reduce-scatter the partial sums, [N*T, H] -> [T, H]."""
        return run_to_end(self.combine_async(rows, metadata))

    def combine_async(self, rows: Tensor, metadata: AllGatherMetadata) -> Resumable[Tensor]:
        """Reduce-scatter the partial sums, yielding meanwhile."""
        return (yield from async_reduce_scatter(rows, self._experts).wait_resumable())
