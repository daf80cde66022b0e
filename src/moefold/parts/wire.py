"""Number formats of dispatched tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.dispatcher import WirePart

if TYPE_CHECKING:
    from torch import Tensor

FP8_BLOCK_SIZE = 128
"""Number of values per scale (arXiv:2412.19437 sec. 3.3.2)."""
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6
E4M3_MANTISSA_BITS = 3
"""Mantissa bits of e4m3 (OCP 8-bit floating point, 2023): no infinity. Values below 2**-6 are multiples of 2**-9."""


@dataclass(frozen=True, kw_only=True)
class ComputeDtypeWire(WirePart, kind="dtype"):
    """The compute type of the model."""

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the identity, because tokens are sent in the dtype of the run."""
        return lambda rows: rows


@dataclass(frozen=True, kw_only=True)
class Fp8BlocksWire(WirePart, kind="fp8-blockwise"):
    """e4m3 with a float32 scale for each 128 values: about half the bytes of bfloat16 (docs/fp8.md)."""

    rounds: ClassVar[bool] = True

    def value_bytes(self, computed_bytes: int) -> float:
        """Return 8 bits, and a share of a float32 scale."""
        return 1 + 4 / 128

    def formula(self) -> Callable[["Tensor"], "Tensor"]:
        """Return the rounding, through which gradients pass unchanged. The trainer's is in `ops/`."""
        import torch

        def round_block(block: "Tensor") -> "Tensor":
            # float32: the scale is stored in it, and a float64 value is converted to e4m3 through it.
            scale = (block.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MAX).float().double()
            value = (block / scale).float().double()
            exponent = torch.frexp(value).exponent - 1
            step = torch.exp2(exponent.clamp(min=E4M3_MIN_EXPONENT).double() - E4M3_MANTISSA_BITS)
            return (value / step).round() * step * scale

        def round_to_blocks(x: "Tensor") -> "Tensor":
            blocks = [round_block(block) for block in x.detach().split(FP8_BLOCK_SIZE, -1)]
            return x + (torch.cat(blocks, -1) - x.detach())

        return round_to_blocks
