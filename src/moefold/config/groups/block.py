"""Frame of a layer: norms of the residual stream and their place, and the activation of the routed experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from moefold.config.base.field import POSITIVE
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import Part

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Norm = Callable[["Tensor"], "Tensor"]


class ResidualFormula(NamedTuple):
    """The residual stream in float64, for the oracle."""

    read: Callable[["Tensor", Norm], "Tensor"]
    """Input of attention, or of the feed-forward network, from the stream and its norm."""
    added: Callable[["Tensor", Norm], "Tensor"]
    """Summand of the stream, from an output and its norm."""


@dataclass(frozen=True, kw_only=True)
class ResidualPart(Part):
    """Placement of the norms of a layer."""

    group: ClassVar[str] = "residual"
    key: ClassVar[str] = "model.residual"
    norms_input: ClassVar[bool] = True
    """True if the inputs of attention and of the feed-forward network have a norm."""
    norms_output: ClassVar[bool] = False
    """True if their outputs have a norm before they are added."""
    multiplier: Annotated[float, POSITIVE] = 1.0
    """Factor of the outputs of attention and of the feed-forward network where they are added to the residual stream
    (Granite)."""

    def formula(self) -> ResidualFormula | None:
        """Return the stream in float64, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class NormPart(Part):
    """Norm of the residual stream."""

    group: ClassVar[str] = "norm"
    key: ClassVar[str] = "model.norm"
    is_of_layers: ClassVar[bool] = True
    saved_numbers: ClassVar[int] = 1
    """Numbers of a token that are saved for backward, without input and output."""
    zero_centered: bool = False
    """Multiply the output of every RMSNorm by 1 + weight, rounded to run.dtype, with weights that start at 0 (Gemma,
    Qwen3-Next). The norm inside linear attention is multiplied by its weight."""
    eps: Annotated[float, POSITIVE] = 1e-6
    """Epsilon of every norm except the norms of latents (mla), whose epsilon is 1e-6."""

    def params(self, name: str, width: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the norm of this name."""
        yield ParamSpec(f"{name}.weight", (width,), "norms")

    def build(self, width: int) -> "Module":
        """Return the module, on the meta device if that is the default."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ActivationPart(Part):
    """Elementwise activation of an expert."""

    group: ClassVar[str] = "activation"
    key: ClassVar[str] = "model.ffn.moe.activation"
    is_swiglu: ClassVar[bool] = False
    """True if the kernels of SwiGLU compute it. Without biases they need one pass over memory."""

    def build(self) -> Any:
        """Return an `ops.swiglu.ExpertActivation`."""
        raise NotImplementedError

    def formula(self) -> Callable[["Tensor", "Tensor"], "Tensor"] | None:
        """Return the hidden values of gate and up projections in float64, or None if it has no formula."""
        return None
