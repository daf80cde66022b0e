"""All-gather: every rank gets the tokens of all ranks. It is simple, and best for small ep * etp."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.dispatcher import (
    DispatcherPart,
    DispatchSizes,
    ExchangeBytes,
    ExpertRows,
    SentTokens,
    Transfer,
)

if TYPE_CHECKING:
    from moefold.comm.groups import MoEGroups
    from moefold.parts.dispatcher.allgather.module import AllGatherDispatcher

INDEX_BYTES = 8
INDICES_PER_ROUTED_TOKEN = 5
"""Indices per routed token of the gathered tokens: expert and position twice each, and the weight."""


@dataclass(frozen=True, kw_only=True)
class AllGatherDispatcherPart(DispatcherPart):
    """Gather the tokens of all ranks, and sum the results of this rank's experts for each of them."""

    gathers_tokens: ClassVar[bool] = True
    needs_spread_experts: ClassVar[bool] = True
    needs_equal_token_counts: ClassVar[bool] = True
    for_inference: ClassVar[bool] = True

    def collectives(self, ep: int, etp: int) -> tuple[str, ...]:
        """Return one collective over all ranks, in each direction."""
        return "dispatch over ep x etp", "combine over ep x etp"

    def traffic(self, sent: SentTokens) -> tuple[Transfer, ...]:
        """Return an all-gather of all tokens. The routed tokens over etp are priced as the all-to-all's."""
        gathered = sent.tokens * sent.ep
        return Transfer("ep", gathered * sent.row_bytes, gathers=True), *super().traffic(sent)[1:]

    def exchange_bytes(self, rows: ExpertRows) -> ExchangeBytes:
        """Return the bytes of all gathered tokens. Their sums are in both types, with indices."""
        ranks = rows.ep * rows.etp
        token = rows.width * (rows.sum_bytes + rows.item_bytes) + INDICES_PER_ROUTED_TOKEN * rows.top_k * INDEX_BYTES
        return ExchangeBytes(
            rows.tokens * ranks * rows.token_bytes,
            rows.tokens * (ranks + 1) * rows.token_bytes,
            rows.tokens * ranks * token,
        )

    def build(self, groups: "MoEGroups", sizes: DispatchSizes) -> "AllGatherDispatcher":
        """Return the dispatcher."""
        from moefold.parts.dispatcher.allgather.module import AllGatherDispatcher

        return AllGatherDispatcher(
            groups.experts, groups.expert_coordinates, sizes.num_experts, fp8_dispatch=sizes.fp8_dispatch
        )
