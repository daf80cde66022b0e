"""Corrections for a sampler that differs from training."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.policy import BoundedCorrection, CorrectionFormula, CorrectionPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoCorrection(CorrectionPart, kind="none"):
    """The unchanged loss."""

    corrects: ClassVar[bool] = False

    def formula(self) -> CorrectionFormula:
        """Return 1."""
        return lambda differences, of_rollout, position: 1.0


@dataclass(frozen=True, kw_only=True)
class ClampedFactor(BoundedCorrection, kind="clamp"):
    """The factor c, clamped to its bounds: truncated importance sampling (TIS)."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token. See the base class."""
        return factor.clamp(self.low, self.high)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            return min(max(exp(float(differences[position])), self.low), self.high)

        return factor


@dataclass(frozen=True, kw_only=True)
class MaskedFactor(BoundedCorrection, kind="mask"):
    """The factor c, or 0 outside of its bounds: masked importance sampling (IcePop)."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token. See the base class."""
        return factor.where((factor >= self.low) & (factor <= self.high), 0.0)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            value = exp(float(differences[position]))
            return value if self.low <= value <= self.high else 0.0

        return factor


@dataclass(frozen=True, kw_only=True)
class MaskedRollout(BoundedCorrection, kind="sequence_mask"):
    """The factor c, or 0 in a rollout whose geometric mean of c is outside of the bounds."""

    reads_rollouts: ClassVar[bool] = True

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token. See the base class."""
        judged = mean(difference).exp()
        return factor.where((judged >= self.low) & (judged <= self.high), 0.0)

    def formula(self) -> CorrectionFormula:
        """Return the factor of one token."""

        def factor(differences: "Tensor", of_rollout: Callable[["Tensor"], "Tensor"], position: int) -> float:
            factors = of_rollout(differences).exp()
            is_kept = self.low <= float(factors.prod() ** (1 / len(factors))) <= self.high
            return exp(float(differences[position])) if is_kept else 0.0

        return factor
