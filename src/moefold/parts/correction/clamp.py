"""Truncated importance sampling (TIS)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from moefold.config.groups.policy import BoundedCorrection, CorrectionFormula

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClampedFactor(BoundedCorrection):
    """The factor, clamped to its bounds."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token; see the base class."""
        return factor.clamp(self.low, self.high)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            return min(max(exp(float(differences[position])), self.low), self.high)

        return factor
