"""Rounding to e4m3 in blocks, in float64; no code is shared with the trainer."""

import torch
from torch import Tensor

FP8_BLOCK_SIZE = 128
"""Number of values per scale (arXiv:2412.19437 sec. 3.3.2)."""
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6
E4M3_MANTISSA_BITS = 3
"""Mantissa bits of e4m3 (OCP 8-bit floating point, 2023): no infinity; values below 2**-6 are multiples of 2**-9."""


def round_to_blocks(x: Tensor) -> Tensor:
    """Quantise and dequantise x [..., H] to e4m3 with a float32 scale per 128 values; the gradient passes straight."""
    blocks = [_quantize_dequantize(block) for block in x.detach().split(FP8_BLOCK_SIZE, -1)]
    return x + (torch.cat(blocks, -1) - x.detach())


def _quantize_dequantize(block: Tensor) -> Tensor:
    # float32: the scale is stored in it, and a float64 value is converted to e4m3 through it.
    scale = (block.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MAX).float().double()
    value = (block / scale).float().double()
    exponent = torch.frexp(value).exponent - 1
    step = torch.exp2(exponent.clamp(min=E4M3_MIN_EXPONENT).double() - E4M3_MANTISSA_BITS)
    return (value / step).round() * step * scale
