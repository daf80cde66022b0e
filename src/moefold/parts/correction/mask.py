"""Masked importance sampling (IcePop)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from moefold.config.groups.policy import BoundedCorrection, CorrectionFormula

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MaskedFactor(BoundedCorrection):
    """The factor, or 0 outside of its bounds."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token; see the base class."""
        return factor.where((factor >= self.low) & (factor <= self.high), 0.0)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            value = exp(float(differences[position]))
            return value if self.low <= value <= self.high else 0.0

        return factor
