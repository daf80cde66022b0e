"""Estimators of the KL divergence from the reference model at a token (J. Schulman, 2020)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KlPart(Part):
    """Penalty of each token (http://joschu.net/blog/kl-approx.html)."""

    group: ClassVar[str] = "kl"
    key: ClassVar[str] = "rl.kl_kind"

    def penalty(self, difference: "Tensor") -> "Tensor":
        """Return the penalty of each token from log(reference / policy), [B, S/cp] -> same."""
        raise NotImplementedError

    def formula(self) -> Callable[["Tensor"], "Tensor"] | None:
        """Return the penalty of one token from the ratio reference / policy, 0-dim; None: it has no formula."""
        return None
