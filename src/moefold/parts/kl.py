"""Estimators of the KL divergence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.policy import KlPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KlBySquare(KlPart, kind="k2"):
    """d**2 / 2, with d = log(reference / policy): its gradient is the gradient of the divergence."""

    def penalty(self, difference: "Tensor") -> "Tensor":
        """Return the penalty of each token."""
        return difference.square() / 2

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the penalty of one token."""
        return lambda ratio: ratio.log() ** 2 / 2


@dataclass(frozen=True, kw_only=True)
class KlByRatio(KlPart, kind="k3"):
    """exp(d) - d - 1, with d = log(reference / policy): not negative."""

    def penalty(self, difference: "Tensor") -> "Tensor":
        """Return the penalty of each token."""
        return difference.exp() - difference - 1

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the penalty of one token."""
        return lambda ratio: ratio - ratio.log() - 1
