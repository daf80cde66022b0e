"""Activations of the routed experts: hidden values from the gate and up projections."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ActivationPart(Part):
    """Elementwise activation of an expert."""

    group: ClassVar[str] = "activation"
    key: ClassVar[str] = "model.moe_activation"
    is_swiglu: ClassVar[bool] = False
    """Whether the kernels of SwiGLU compute it. Without biases they take one pass over memory."""

    def build(self) -> Any:
        """Return an `ops.swiglu.ExpertActivation`."""
        raise NotImplementedError

    def formula(self) -> Callable[["Tensor", "Tensor"], "Tensor"] | None:
        """Return the hidden values of gate and up projections in float64; None: it has no formula."""
        return None
