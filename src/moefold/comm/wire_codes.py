"""Codes of fewer bits for the differences that sites exchange: bfloat16, int8 and fp4 in blocks.

A block of 256 elements has a float32 scale, its largest magnitude. Decoded values have the same bits on every machine,
because each step is one rounded operation on each element. The code of a block does not depend on other blocks.
Non-finite values must not be decoded.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from moefold.cost.site_traffic import BLOCK, SCALE_BYTES, CodedSize, wire_format

_INT8_MAX = 127.0
_FP4_MIN_EXPONENT = -6
"""Smallest magnitude of fp4, a power of two below the scale."""
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of a float32 except the sign."""
_HALF_MANTISSA = 1 << _MANTISSA_BITS - 1
_HALF_FP4_MIN = _EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1 << _MANTISSA_BITS
"""Bits of half of the smallest magnitude of fp4, as float32."""


class WireCode(ABC):
    """Code of a vector as bytes."""

    format: CodedSize
    """Size of the code."""

    @property
    def block(self) -> int:
        """Elements that are coded together. Their code depends on no other elements."""
        return self.format.block

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Return the code of a vector on the host, uint8 [num_bytes]."""

    @abstractmethod
    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """Return the decoded vector, of the size and type of `like`."""


class PlainCode(WireCode):
    """The bytes of the vector itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.format = CodedSize(8 * dtype.itemsize)

    def encode(self, x: Tensor) -> Tensor:
        """See base class."""
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """See base class."""
        return code.view(self.dtype).to(like.dtype)


class _BlockCode(WireCode):
    """Code with a scale for each block: the codes of the elements, then the scales."""

    def encode(self, x: Tensor) -> Tensor:
        """See base class."""
        padded = torch.zeros(-(-len(x) // BLOCK) * BLOCK)
        padded[: len(x)] = x
        blocks = padded.view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # The ratio to a scale of 0 is never used: all elements of the block are 0.
        ratios = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = self._encode(ratios.flatten()[: len(x)])
        return torch.cat([codes, scales.view(torch.uint8)])

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """See base class."""
        num_scales = -(-len(like) // BLOCK)
        codes, scales = code.split([len(code) - SCALE_BYTES * num_scales, SCALE_BYTES * num_scales])
        padded = torch.zeros(num_scales * BLOCK)
        padded[: len(like)] = self._decode(codes, len(like))
        return (
            (padded.view(-1, BLOCK) * scales.clone().view(torch.float32)[:, None]).flatten()[: len(like)].to(like.dtype)
        )

    @abstractmethod
    def _encode(self, ratios: Tensor) -> Tensor:
        """Return the codes of values in [-1, 1], uint8."""

    @abstractmethod
    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        """Return values in [-1, 1], float32 [numel]."""


class Int8Code(_BlockCode):
    """Integers of 8 bits, of a 127th of the scale each."""

    format = wire_format("int8", 4)

    def _encode(self, ratios: Tensor) -> Tensor:
        return (ratios * _INT8_MAX).round().to(torch.int8).view(torch.uint8)

    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        return codes.view(torch.int8).float() / _INT8_MAX


class Fp4Code(_BlockCode):
    """Sign and three bits of exponent (E3M0): 0, and the scale times 2**-6 to 1, rounded to the nearest."""

    format = wire_format("fp4", 4)

    def _encode(self, ratios: Tensor) -> Tensor:
        padded = functional.pad(ratios, (0, len(ratios) % 2))
        bits = padded.view(torch.int32)
        magnitudes = bits & _MAGNITUDE_BITS
        # Half a mantissa carries into the exponent from 1.5 on, which is half-way between two powers of two.
        level = (magnitudes + _HALF_MANTISSA >> _MANTISSA_BITS) - (_EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1)
        # Below the smallest power, half of it is half-way to 0.
        level = torch.maximum(level, (magnitudes >= _HALF_FP4_MIN).int())
        codes = (level | (bits < 0).int() << 3).to(torch.uint8)
        return codes[::2] | codes[1::2] << 4

    def _decode(self, codes: Tensor, numel: int) -> Tensor:
        nibbles = torch.stack([codes & 15, codes >> 4], 1).flatten()[:numel].int()
        level = nibbles & 7
        bits = level + (_EXPONENT_BIAS + _FP4_MIN_EXPONENT - 1) << _MANTISSA_BITS
        # A level of 0 is 0. The sign is the highest of 32 bits.
        bits = bits * (level > 0) | nibbles >> 3 << 31
        return bits.view(torch.float32)


def make_wire_code(precision: str, dtype: torch.dtype) -> WireCode:
    """Return the code of `sites.precision` for vectors of a type.

    Args:
        precision: float32 (the vector itself), bfloat16, int8 or fp4.
    """
    match precision:
        case "bfloat16":
            return PlainCode(torch.bfloat16)
        case "int8":
            return Int8Code()
        case "fp4":
            return Fp4Code()
    return PlainCode(dtype)
