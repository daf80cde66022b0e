"""The dispatcher of one rank that holds all experts: the reference for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.permute import as_counts, permute, permute_probs, plan_permutation, unpermute
from moefold.ops.interface import Permutation, PermuteMap
from moefold.ops.quantization.formats import straight_through_quantize


@dataclass(frozen=True)
class LocalMetadata:
    """Nothing travels: the permutation is the way."""

    permutation: Permutation
    probs_TK: Tensor | None
    tokens_per_expert: Sequence[int]


class LocalDispatcher(Dispatcher[LocalMetadata]):
    """Permutes by expert; communicates nothing.

    Args:
        num_experts: E.
        fp8_dispatch: whether experts are given the rounded rows that other dispatchers would bring them.
    """

    combines_locally = True

    def __init__(self, num_experts: int, *, fp8_dispatch: bool = False) -> None:
        self._num_experts = num_experts
        self._fp8_dispatch = fp8_dispatch

    def dispatch_preprocess(self, x_TH: Tensor, routing_map: RoutingMap) -> tuple[Tensor, LocalMetadata]:
        """Decide how the copies are sorted."""
        permutation = plan_permutation(
            routing_map.ids_TK, self._num_experts, routing_map.kept_TK, routing_map.padded_capacity
        )
        if routing_map.padded_capacity is None:
            rows_per_expert = as_counts(permutation.tokens_per_expert_E)
        else:
            rows_per_expert = [routing_map.padded_capacity] * self._num_experts
        rows = straight_through_quantize(x_TH) if self._fp8_dispatch else x_TH
        return rows, LocalMetadata(permutation, routing_map.probs_TK, rows_per_expert)

    def dispatch_communicate(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Nothing to exchange."""
        return rows

    def dispatch_postprocess(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Sort the copies by expert."""
        return permute(rows, metadata.permutation)

    def permute_map(self, metadata: LocalMetadata) -> PermuteMap:
        """The permutation."""
        return PermuteMap.from_permutation(metadata.permutation)

    def combine_preprocess(self, y_RH: Tensor, metadata: LocalMetadata) -> Tensor:
        """Sum the copies of each token, weighted."""
        return unpermute(y_RH, metadata.permutation, metadata.probs_TK)

    def combine_communicate(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """Nothing to exchange."""
        return rows

    def combine_postprocess(self, rows: Tensor, metadata: LocalMetadata) -> Tensor:
        """They are sums already."""
        return rows

    def dispatch_probs(self, metadata: LocalMetadata) -> tuple[Tensor, LocalMetadata]:
        """They are here already."""
        assert metadata.probs_TK is not None
        return permute_probs(metadata.probs_TK, metadata.permutation), replace(metadata, probs_TK=None)
