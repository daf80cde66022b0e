"""Activations of routed experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.base.field import POSITIVE
from moefold.config.groups.block import ActivationPart

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.ops.swiglu import ClampedSwiGLUActivation, SwiGLUActivation


@dataclass(frozen=True, kw_only=True)
class SwiGluActivationPart(ActivationPart, kind="swiglu"):
    """SwiGLU (arXiv:2002.05202): multiply the up projection by the SiLU of the gate projection."""

    is_swiglu: ClassVar[bool] = True

    def build(self) -> "SwiGLUActivation":
        """Return the same object for all layers."""
        from moefold.ops.swiglu import SWIGLU

        return SWIGLU

    def formula(self) -> Callable[["Tensor", "Tensor"], "Tensor"]:
        """Return g * sigmoid(g) * u."""
        return lambda gated, raised: gated * gated.sigmoid() * raised


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGluActivationPart(ActivationPart, kind="clamped_swiglu"):
    """SwiGLU of gpt-oss (arXiv:2508.10925): both projections are clamped, and 1 is added to the up projection.

    (min(max(up, -l), l) + 1) * g * sigmoid(a * g) with g = min(gate, l).
    """

    alpha: Annotated[float, POSITIVE] = 1.702
    """Gain a of the sigmoid. The default is gpt-oss's."""
    limit: Annotated[float, POSITIVE] = 7.0
    """Limit l of the projections. The default is gpt-oss's."""

    def build(self) -> "ClampedSwiGLUActivation":
        """Return the activation with the gain and limit."""
        from moefold.ops.swiglu import ClampedSwiGLUActivation

        return ClampedSwiGLUActivation(self.alpha, self.limit)

    def formula(self) -> Callable[["Tensor", "Tensor"], "Tensor"]:
        """Return (u + 1) * g * sigmoid(alpha * g) of clamped projections, whose clamped values have no gradient."""
        import torch

        def activate(gated: "Tensor", raised: "Tensor") -> "Tensor":
            gated = torch.where(gated > self.limit, self.limit, gated)
            raised = torch.where(raised.abs() > self.limit, self.limit * raised.sign(), raised) + 1
            return gated * torch.sigmoid(self.alpha * gated) * raised

        return activate
