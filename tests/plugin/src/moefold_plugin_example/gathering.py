"""A dispatcher of the example package."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.comm.groups import Group, MoEGroups
from moefold.config.groups.dispatcher import (
    DispatcherPart,
    DispatchSizes,
    ExchangeBytes,
    ExpertRows,
    SentTokens,
    Transfer,
)
from moefold.config.sections.moe import MoEConfig
from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.permute import as_counts, permute, permute_probs, plan_permutation, unpermute
from moefold.ops.expert_ops import Permutation


@dataclass(frozen=True)
class GatheringMetadata:
    """The routing of one micro-batch, over the tokens of all N ranks."""

    permutation: Permutation
    probs_TK: Tensor | None
    """[N*T, K]; None once the experts have applied them."""
    tokens_per_expert: Sequence[int]


class GatheringDispatcher(Dispatcher[GatheringMetadata]):
    """All-gather of tokens and reduce-scatter of results over the ep ranks, without pauses."""

    combines_locally = True

    def __init__(self, ep: Group, num_experts: int) -> None:
        self._ep = ep
        self._num_local = num_experts // ep.size

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, GatheringMetadata]:
        """Gather the routing, and select the routed tokens of this rank's experts."""
        ids_TK = all_gather(routing_map.ids_TK, self._ep) - self._ep.rank * self._num_local
        is_local_TK = (ids_TK >= 0) & (ids_TK < self._num_local)
        permutation = plan_permutation(ids_TK, self._num_local, is_local_TK, None)
        counts = as_counts(permutation.tokens_per_expert_E)
        return x_TH, GatheringMetadata(permutation, all_gather(routing_map.probs_TK, self._ep), counts)

    def dispatch_communicate(self, rows: Tensor, metadata: GatheringMetadata) -> Tensor:
        """Gather the tokens of all ranks, [N*T, H]."""
        return all_gather(rows, self._ep)

    def dispatch_postprocess(self, rows: Tensor, metadata: GatheringMetadata) -> Tensor:
        """Sort the routed tokens of this rank's experts by expert."""
        return permute(rows, metadata.permutation)

    def combine_preprocess(self, y_RH: Tensor, metadata: GatheringMetadata) -> Tensor:
        """Sum the results of this rank's experts for each token of all ranks, [N*T, H]."""
        return unpermute(y_RH, metadata.permutation, metadata.probs_TK)

    def combine_communicate(self, rows: Tensor, metadata: GatheringMetadata) -> Tensor:
        """Add the sums of all ranks; each rank receives the sums of its own tokens."""
        return reduce_scatter(rows, self._ep)

    def combine_postprocess(self, rows: Tensor, metadata: GatheringMetadata) -> Tensor:
        """Return the sums, which are complete."""
        return rows

    def dispatch_probs(self, metadata: GatheringMetadata) -> tuple[Tensor, GatheringMetadata]:
        """Return the router's weights of this rank's rows."""
        assert metadata.probs_TK is not None
        return permute_probs(metadata.probs_TK, metadata.permutation), replace(metadata, probs_TK=None)


@dataclass(frozen=True, kw_only=True)
class Gathering(DispatcherPart):
    """Gather the tokens of all ranks."""

    interface: ClassVar[int] = 1
    gathers_tokens: ClassVar[bool] = True
    needs_spread_experts: ClassVar[bool] = True
    needs_whole_experts: ClassVar[bool] = True
    needs_equal_token_counts: ClassVar[bool] = True

    def unsupported(self, moe: MoEConfig) -> Iterator[str]:
        """Yield dropped tokens, and tokens in 8 bits."""
        if moe.capacity_factor > 0:
            yield f"it drops no token, and moe.capacity_factor={moe.capacity_factor:g} does"
        if moe.dispatch_precision.rounds:
            yield f"it sends tokens in run.dtype, and moe.dispatch_precision='{moe.dispatch_precision}'"

    def collectives(self, ep: int, etp: int) -> tuple[str, ...]:
        """Return one collective in each direction."""
        return "dispatch over ep", "combine over ep"

    def traffic(self, sent: SentTokens) -> tuple[Transfer, ...]:
        """Return the all-gather of the tokens."""
        return (Transfer("ep", sent.tokens * sent.ep * sent.row_bytes, gathers=True),)

    def exchange_bytes(self, rows: ExpertRows) -> ExchangeBytes:
        """Return the bytes of the tokens of all ranks, and of their sums in both types."""
        gathered = rows.tokens * rows.ep
        sums = gathered * rows.width * (rows.sum_bytes + rows.item_bytes)
        return ExchangeBytes(gathered * rows.token_bytes, (gathered + rows.tokens) * rows.token_bytes, sums)

    def build(self, groups: MoEGroups, sizes: DispatchSizes) -> GatheringDispatcher:
        """Return the module for the groups of a run."""
        return GatheringDispatcher(groups.ep, sizes.num_experts)
