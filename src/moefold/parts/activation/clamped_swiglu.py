"""SwiGLU of gpt-oss (arXiv:2508.10925): both projections are clamped, and 1 is added to the up projection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moefold.config.field import POSITIVE
from moefold.config.groups.block import ActivationPart

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.ops.swiglu import ClampedSwiGLUActivation


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGluActivationPart(ActivationPart):
    """Clamp the projections before the activation."""

    alpha: Annotated[float, POSITIVE] = 1.702
    """Gain a of the sigmoid; the default is gpt-oss's."""
    limit: Annotated[float, POSITIVE] = 7.0
    """Limit l of the projections; the default is gpt-oss's."""

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
