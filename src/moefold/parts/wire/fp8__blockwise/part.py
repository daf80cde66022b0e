"""Tokens are sent in e4m3 with a float32 scale for each 128 values: about half the bytes of bfloat16 (docs/fp8.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.dispatcher import WirePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(WirePart):
    """e4m3 in blocks of 128 values with a scale each."""

    rounds: ClassVar[bool] = True

    def value_bytes(self, computed_bytes: int) -> float:
        """Return 8 bits, and a share of a float32 scale."""
        return 1 + 4 / 128

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the rounding, through which gradients pass unchanged."""
        from moefold.parts.wire.fp8__blockwise.oracle import round_to_blocks

        return round_to_blocks
