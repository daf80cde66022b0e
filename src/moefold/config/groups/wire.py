"""Number formats of tokens that are dispatched to experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class WirePart(Part):
    """Number format of dispatched tokens. The default is the type in which the model computes."""

    group: ClassVar[str] = "wire"
    key: ClassVar[str] = "moe.dispatch_precision"
    rounds: ClassVar[bool] = False
    """Whether tokens are rounded to e4m3 with one scale for each 128 values before they are sent."""

    def value_bytes(self, computed_bytes: int) -> float:
        """Return the bytes of a dispatched value, with its share of a scale.

        Args:
            computed_bytes: bytes of a value in the type in which the model computes.
        """
        return float(computed_bytes)

    def formula(self) -> Callable[["Tensor"], "Tensor"] | None:
        """Return the rounding of the input of the experts, [..., H]; None: it has no formula."""
        return None
