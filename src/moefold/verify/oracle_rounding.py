"""What rows become that are sent to experts in 8 bits, written from the format's definition."""

import torch
from torch import Tensor

FP8_BLOCK_SIZE = 128
"""Values to a scale (arXiv:2412.19437 sec. 3.3.2)."""
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6
E4M3_MANTISSA_BITS = 3
"""Of e4m3 (OCP 8-bit floating point, 2023): no infinity, and values below 2**-6 are multiples of 2**-9."""


def fp8_round_trip(x: Tensor) -> Tensor:
    """[..., H] with each 128 values along H rounded to e4m3 times a float32 scale; the gradient is that of x itself."""
    blocks = [_quantize_dequantize(block) for block in x.detach().split(FP8_BLOCK_SIZE, -1)]
    return x + (torch.cat(blocks, -1) - x.detach())


def _quantize_dequantize(block: Tensor) -> Tensor:
    # float32 twice: the scale is one, and a value of float64 becomes e4m3 by way of it.
    scale = (block.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E4M3_MAX).float().double()
    value = (block / scale).float().double()
    exponent = torch.frexp(value).exponent - 1
    step = torch.exp2(exponent.clamp(min=E4M3_MIN_EXPONENT).double() - E4M3_MANTISSA_BITS)
    return (value / step).round() * step * scale
