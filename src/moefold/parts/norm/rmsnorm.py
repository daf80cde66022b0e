"""RMSNorm: root-mean-square normalisation (arXiv:1910.07467)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moefold.config.groups.block import NormPart

if TYPE_CHECKING:
    from moefold.model.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class RmsNormPart(NormPart):
    """Divide by the root mean square."""

    def build(self, width: int) -> "RMSNorm":
        """Return an `RMSNorm`."""
        from moefold.model.norm import RMSNorm

        return RMSNorm(width, self.eps, zero_centered=self.zero_centered)

    def formula(self) -> Callable[..., Any]:
        """Return x * weight divided by the root of the mean square."""

        def normalize(x: Any, weight: Any, bias: None) -> Any:
            scale = 1 + weight if self.zero_centered else weight
            return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * scale

        return normalize
