"""SwiGLU (arXiv:2002.05202)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.block import ActivationPart

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.ops.swiglu import SwiGLUActivation


@dataclass(frozen=True, kw_only=True)
class SwiGluActivationPart(ActivationPart):
    """Multiply the up projection by the SiLU of the gate projection."""

    is_swiglu: ClassVar[bool] = True

    def build(self) -> "SwiGLUActivation":
        """Return the same object for all layers."""
        from moefold.ops.swiglu import SWIGLU

        return SWIGLU

    def formula(self) -> Callable[["Tensor", "Tensor"], "Tensor"]:
        """Return g * sigmoid(g) * u."""
        return lambda gated, raised: gated * gated.sigmoid() * raised
