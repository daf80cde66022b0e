"""Metrics of an MoE layer in a step: load of the experts, dropped tokens, entropy, losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerMetrics:
    """Metrics of one MoE layer over the global batch. Loads are routed tokens before drops."""

    layer: int
    load: float
    load_cv: float
    dead_experts: int
    dropped_fraction: float
    zero_fraction: float
    router_entropy: float
    aux_loss: float
    z_loss: float
    bias_min: float | None
    bias_max: float | None

    @classmethod
    def from_totals(
        cls,
        layer: int,
        *,
        counts: Sequence[float],
        dropped: float,
        entropy: float,
        top_k: int,
        losses: tuple[float, float],
        bias: Sequence[float] = (),
        zero_counts: Sequence[float] = (),
    ) -> Self:
        """Compute the metrics from sums over the global batch.

        Args:
            counts: routed tokens of each expert.
            entropy: sum over tokens.
            losses: aux loss and z-loss, including coefficients.
            bias: bias of each expert. Empty means no bias.
            zero_counts: routed tokens of each zero-computation expert.
        """
        counts_E = np.asarray(counts, dtype=np.float64)
        num_zero = float(sum(zero_counts))
        # A step with only padding routes nothing, and possibly no token has chosen an expert with computation.
        num_routed = float(counts_E.sum()) + num_zero or 1.0
        mean = float(counts_E.mean()) or 1.0
        return cls(
            layer=layer,
            load=float(counts_E.max()) / mean,
            load_cv=float(counts_E.std()) / mean,
            dead_experts=int((counts_E == 0).sum()),
            dropped_fraction=dropped / num_routed,
            zero_fraction=num_zero / num_routed,
            router_entropy=entropy * top_k / num_routed,
            aux_loss=losses[0],
            z_loss=losses[1],
            bias_min=min(bias, default=None),
            bias_max=max(bias, default=None),
        )
