"""Dispatcher of one rank that holds all experts: the reference for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.permute import (
    as_counts,
    permute,
    permute_probs,
    plan_permutation,
    truncate_permutation,
    unpermute,
)
from moefold.ops.expert_ops import LazyCounts, Permutation, PermuteMap
from moefold.ops.quantization.formats import straight_through_quantize


@dataclass(frozen=True)
class LocalMetadata:
    """Dispatch state of one micro-batch without communication."""

    permutation: Permutation
    probs_TK: Tensor | None
    tokens_per_expert: Sequence[int]


class LocalDispatcher(Dispatcher[LocalMetadata]):
    """Dispatcher that permutes by expert, without communication.

    Args:
        fp8_dispatch: True: quantise and dequantise the tokens, as dispatchers that send them in FP8 do.
    """

    combines_locally = True
    takes_any_tokens = True

    def __init__(self, num_experts: int, *, fp8_dispatch: bool = False) -> None:
        self._num_experts = num_experts
        self.fp8_dispatch = fp8_dispatch

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, LocalMetadata]:
        """Plan the permutation by expert; rows of dropped tokens follow the experts' rows where counting waits."""
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
        return rows, LocalMetadata(permutation, routing_map.probs_TK, tokens_per_expert)

    def dispatch_communicate(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Return rows unchanged."""
        return rows

    def dispatch_postprocess(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Permute the tokens by expert."""
        return permute(rows, metadata.permutation, self.permute_ops)

    def permute_map(self, metadata: LocalMetadata) -> PermuteMap:
        """Return the permutation by expert."""
        return PermuteMap.from_permutation(metadata.permutation)

    def combine_preprocess(self, y_RH: Tensor, metadata: LocalMetadata) -> Tensor:
        """Compute the weighted sum of each token's expert outputs."""
        return unpermute(y_RH, metadata.permutation, metadata.probs_TK, self.permute_ops)

    def combine_communicate(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Return rows unchanged."""
        return rows

    def combine_postprocess(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Return the rows, which `combine_preprocess` has summed, unchanged."""
        return rows

    def dispatch_probs(self, metadata: LocalMetadata) -> tuple[Tensor, LocalMetadata]:
        """Permute the local routing probabilities."""
        assert metadata.probs_TK is not None
        return permute_probs(metadata.probs_TK, metadata.permutation), replace(metadata, probs_TK=None)
