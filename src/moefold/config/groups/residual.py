"""Residual stream: where its norms are, and the factor of what attention and the feed-forward network add to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from moefold.config.part import FlatKey, Part

if TYPE_CHECKING:
    from torch import Tensor

Norm = Callable[["Tensor"], "Tensor"]


class ResidualFormula(NamedTuple):
    """The residual stream in float64, for the oracle."""

    read: Callable[["Tensor", Norm], "Tensor"]
    """Input of attention, or of the feed-forward network, from the stream and its norm."""
    added: Callable[["Tensor", Norm], "Tensor"]
    """What is added to the stream, from an output and its norm."""


@dataclass(frozen=True, kw_only=True)
class ResidualPart(Part):
    """Placement of the norms of a layer."""

    group: ClassVar[str] = "residual"
    key: ClassVar[str] = "model.norm_placement"
    norms_input: ClassVar[bool] = True
    """Whether the inputs of attention and of the feed-forward network have a norm."""
    norms_output: ClassVar[bool] = False
    """Whether their outputs have one, before they are added."""
    multiplier: Annotated[float, FlatKey("model.residual_multiplier")]

    def formula(self) -> ResidualFormula | None:
        """Return the stream in float64; None: it has no formula."""
        return None
