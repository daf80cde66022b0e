"""Norms of the residual stream."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.block import NormPart
from moefold.message_text import Problem

if TYPE_CHECKING:
    from moefold.model.norm import LayerNorm, RMSNorm


@dataclass(frozen=True, kw_only=True)
class RmsNormPart(NormPart, kind="rmsnorm"):
    """Divide by the root mean square (arXiv:1910.07467)."""

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


@dataclass(frozen=True, kw_only=True)
class LayerNormPart(NormPart, kind="layernorm"):
    """Subtract the mean and divide by the deviation. A weight and a bias follow (arXiv:1607.06450)."""

    saved_numbers: ClassVar[int] = 2

    def check(self) -> Iterator[Problem]:
        """Yield an error for weights around zero."""
        if self.zero_centered:
            yield Problem(
                "model.norm.zero_centered",
                True,
                f"is incompatible with model.norm={self.kind!r}, whose weights start at 1",
                "set zero_centered=false, or norm='rmsnorm'",
            )

    def params(self, name: str, width: int) -> Iterator[ParamSpec]:
        """Yield weight and bias."""
        yield from super().params(name, width)
        yield ParamSpec(f"{name}.bias", (width,), "norms", drawn="zeros")

    def build(self, width: int) -> "LayerNorm":
        """Return a `LayerNorm`."""
        from moefold.model.norm import LayerNorm

        return LayerNorm(width, self.eps)

    def formula(self) -> Callable[..., Any]:
        """Return the deviation from the mean over the root of the variance, scaled and shifted."""

        def normalize(x: Any, weight: Any, bias: Any) -> Any:
            centered = x - x.mean(-1, keepdim=True)
            return centered / (centered.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight + bias

        return normalize
