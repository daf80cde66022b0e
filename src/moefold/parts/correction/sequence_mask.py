"""Importance sampling that masks whole rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.policy import BoundedCorrection, CorrectionFormula

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MaskedRollout(BoundedCorrection):
    """The factor, or 0 in a rollout whose geometric mean of factors is outside of the bounds."""

    reads_rollouts: ClassVar[bool] = True

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token; see the base class."""
        judged = mean(difference).exp()
        return factor.where((judged >= self.low) & (judged <= self.high), 0.0)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            factors = of_rollout(differences).exp()
            is_kept = self.low <= float(factors.prod() ** (1 / len(factors))) <= self.high
            return exp(float(differences[position])) if is_kept else 0.0

        return factor
