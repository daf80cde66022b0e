"""Every rank sees the tokens of all ranks and serves those that chose its experts: simple, best for small ep * etp."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.comm.async_collectives import IDENTITY, async_all_gather, async_reduce_scatter
from moefold.comm.collectives import all_gather
from moefold.comm.groups import Group
from moefold.comm.resumable import Resumable, run_to_end
from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap, SplitSizes, fp8_wire_format
from moefold.model.moe.permute import as_counts, permute, permute_probs, plan_permutation, unpermute
from moefold.ops.interface import Permutation, PermuteMap


@dataclass(frozen=True)
class AllGatherMetadata:
    """The permutation is over the tokens of all N ranks, with the copies for this rank's experts alone."""

    permutation: Permutation
    probs_TK: Tensor | None
    """Of all ranks, [N*T, K]; None where the experts have weighted the results."""
    tokens_per_expert: Sequence[int]
    num_tokens: int
    """Of one rank, T."""


class AllGatherDispatcher(Dispatcher[AllGatherMetadata]):
    """All-gather of tokens and reduce-scatter of results over ep x etp.

    Args:
        experts: the ep x etp ranks that hold all experts between them, each with equally many tokens.
        expert_coordinates: (ep, etp) coordinate of each member of `experts`.
        num_experts: E, over all ranks.
        fp8_dispatch: whether tokens travel to the experts in 8 bits.
    """

    combines_locally = True

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
        num_parts = 1 + max(ep for ep, _ in expert_coordinates)
        self._num_local = num_experts // num_parts
        self._first_expert = expert_coordinates[experts.rank][0] * self._num_local

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, AllGatherMetadata]:
        """Gather the routing of all ranks and pick the copies for my experts."""
        ids_TK = routing_map.ids_TK
        if routing_map.kept_TK is not None:
            ids_TK = ids_TK.masked_fill(~routing_map.kept_TK, -1)
        local_ids_TK = all_gather(ids_TK, self._experts) - self._first_expert
        mine_TK = (local_ids_TK >= 0) & (local_ids_TK < self._num_local)
        slots = None if routing_map.padded_capacity is None else routing_map.padded_capacity * self._experts.size
        permutation = plan_permutation(local_ids_TK, self._num_local, mine_TK, slots)
        rows_per_expert = as_counts(permutation.tokens_per_expert_E) if slots is None else [slots] * self._num_local
        # Each rank uses some of the weights and, under etp, sees a part of their gradient: the adjoint sums the parts.
        probs_TK = all_gather(routing_map.probs_TK, self._experts)
        return x_TH, AllGatherMetadata(permutation, probs_TK, rows_per_expert, len(x_TH))

    def dispatch_communicate(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """Gather the tokens of all ranks, [N*T, H]."""
        return run_to_end(self.dispatch_async(rows, metadata))[0]

    def routing_split_sizes(self, x_TH: Tensor) -> Sequence[SplitSizes]:
        """The routing of my tokens goes to all."""
        return (self._equal_splits(len(x_TH)),)

    def split_sizes(self, metadata: AllGatherMetadata) -> Sequence[SplitSizes]:
        """My tokens go to all."""
        return (self._equal_splits(metadata.num_tokens),)

    def _equal_splits(self, num_tokens: int) -> SplitSizes:
        counts = [num_tokens] * self._experts.size
        return SplitSizes("experts", counts, counts)

    def dispatch_async(
        self, rows: Tensor, metadata: AllGatherMetadata, compute: Callable[[], Tensor] | None = None
    ) -> Resumable[tuple[Tensor, Tensor | None]]:
        """Pauses while the tokens are gathered."""
        in_flight = async_all_gather(rows, self._experts, fp8_wire_format(rows) if self._fp8_dispatch else IDENTITY)
        computed = None if compute is None else compute()
        return (yield from in_flight.wait_resumable()), computed

    def dispatch_postprocess(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """Take my experts' copies, sorted."""
        return permute(rows, metadata.permutation)

    def permute_map(self, metadata: AllGatherMetadata) -> PermuteMap:
        """The permutation."""
        return PermuteMap.from_permutation(metadata.permutation)

    def combine_preprocess(self, y_RH: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """My experts' part of the weighted sum for the tokens of all ranks, [N*T, H]."""
        return unpermute(y_RH, metadata.permutation, metadata.probs_TK)

    def combine_communicate(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """Add the parts of all ranks; each keeps its own tokens."""
        return run_to_end(self.combine_async(rows, metadata))

    def combine_async(self, rows: Tensor, metadata: AllGatherMetadata) -> Resumable[Tensor]:
        """Pauses while the parts travel."""
        return (yield from async_reduce_scatter(rows, self._experts).wait_resumable())

    def combine_postprocess(self, rows: Tensor, metadata: AllGatherMetadata) -> Tensor:
        """They are home already."""
        return rows

    def dispatch_probs(self, metadata: AllGatherMetadata) -> tuple[Tensor, AllGatherMetadata]:
        """They are here already."""
        assert metadata.probs_TK is not None
        return permute_probs(metadata.probs_TK, metadata.permutation), replace(metadata, probs_TK=None)
