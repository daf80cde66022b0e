"""What one MoE layer did in one optimizer step: the balance of its experts and the terms of its router."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class MoELayerMetrics:
    """Over the whole global batch; loads are copies before any is dropped."""

    layer: int
    """Number of the layer in the whole model."""
    load: float
    """Copies of the fullest expert over the mean; 1 is perfect balance."""
    load_cv: float
    """Coefficient of variation of the copies of the experts: standard deviation over mean; 0 is perfect balance."""
    dead_experts: int
    """Experts that no token chose."""
    dropped_fraction: float
    """Dropped copies over all of them."""
    router_entropy: float
    """Mean over the tokens of the entropy of their scores, in nats; ln(num_experts) where all experts score alike."""
    aux_loss: float
    """Load-balancing loss of this layer as it was optimised, its coefficient included."""
    z_loss: float
    """Router z-loss of this layer as it was optimised, its coefficient included."""
    bias_min: float | None
    """Smallest expert bias that this step routed with; None without model.expert_bias."""
    bias_max: float | None
    """Largest expert bias that this step routed with; None without model.expert_bias."""

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
    ) -> Self:
        """Make them of sums over the global batch.

        Args:
            layer: its number.
            counts: copies of each expert.
            dropped: copies dropped.
            entropy: sum over tokens.
            top_k: copies of a token.
            losses: aux and z as optimised.
            bias: of each expert; empty if there is none.
        """
        counts_E = np.asarray(counts, dtype=np.float64)
        copies = float(counts_E.sum())
        mean = copies / len(counts_E)
        return cls(
            layer=layer,
            load=float(counts_E.max()) / mean,
            load_cv=float(counts_E.std()) / mean,
            dead_experts=int((counts_E == 0).sum()),
            dropped_fraction=dropped / copies,
            router_entropy=entropy * top_k / copies,
            aux_loss=losses[0],
            z_loss=losses[1],
            bias_min=min(bias, default=None),
            bias_max=max(bias, default=None),
        )
