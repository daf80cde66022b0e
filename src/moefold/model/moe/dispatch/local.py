"""Dispatcher of one rank that holds all experts: the reference for all others."""

from collections.abc import Sequence

from torch import Tensor

from moefold.model.moe.dispatch.base import RoutingMap
from moefold.model.moe.dispatch.partial_sums import DispatchState, PartialSumDispatcher, ReceivedTokens
from moefold.model.moe.permute import as_counts, plan_permutation, truncate_permutation
from moefold.ops.expert_ops import LazyCounts
from moefold.ops.quantization.formats import straight_through_quantize


class LocalDispatcher(PartialSumDispatcher[DispatchState]):
    """Dispatcher that permutes by expert, without communication.

    Args:
        fp8_dispatch: True: quantise and dequantise the tokens, as dispatchers that send them in FP8 do.
    """

    takes_any_tokens = True

    def __init__(self, num_experts: int, *, fp8_dispatch: bool = False) -> None:
        self._num_experts = num_experts
        self.fp8_dispatch = fp8_dispatch

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, DispatchState]:
        """Plan the permutation by expert. Rows of dropped tokens follow the experts' rows where counting waits."""
        ids_TK = routing_map.ids_TK
        permutation = plan_permutation(
            ids_TK, self._num_experts, routing_map.kept_TK, routing_map.padded_capacity, num_rows=ids_TK.numel()
        )
        tokens_per_expert: Sequence[int]
        if routing_map.padded_capacity is None:
            tokens_per_expert = as_counts(permutation.tokens_per_expert_E)
            if not isinstance(tokens_per_expert, LazyCounts):
                permutation = truncate_permutation(permutation, sum(tokens_per_expert))
        else:
            values = [routing_map.padded_capacity] * self._num_experts
            tokens_per_expert = as_counts(permutation.tokens_per_expert_E, values)
        rows = straight_through_quantize(x_TH) if self.fp8_dispatch else x_TH
        received = ReceivedTokens(permutation, routing_map.probs_TK, tokens_per_expert)
        return rows, DispatchState(arrived=received)

    def dispatch_communicate(self, rows: Tensor, metadata: DispatchState) -> Tensor:
        """Return rows unchanged."""
        return rows

    def combine_communicate(self, rows: Tensor, metadata: DispatchState) -> Tensor:
        """Return rows unchanged."""
        return rows
