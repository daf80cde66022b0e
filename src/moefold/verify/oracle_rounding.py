"""What rows become that are sent to experts in 8 bits, written from the format's definition."""

import torch
from torch import Tensor

BLOCK = 128
"""Values to a scale (arXiv:2412.19437 sec. 3.3.2)."""
LARGEST = 448.0
LEAST_EXPONENT = -6
MANTISSA_BITS = 3
"""Of e4m3 (OCP 8-bit floating point, 2023): no infinity, and values below 2**-6 are multiples of 2**-9."""


def sent_in_8_bits(x: Tensor) -> Tensor:
    """[..., H] with each 128 values along H rounded to e4m3 times a float32 scale; the gradient is that of x itself."""
    blocks = [_rounded(block) for block in x.detach().split(BLOCK, -1)]
    return x + (torch.cat(blocks, -1) - x.detach())


def _rounded(block: Tensor) -> Tensor:
    # float32 twice: the scale is one, and a value of float64 becomes e4m3 by way of it.
    scale = (block.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST).float().double()
    value = (block / scale).float().double()
    exponent = torch.frexp(value).exponent - 1
    step = torch.exp2(exponent.clamp(min=LEAST_EXPONENT).double() - MANTISSA_BITS)
    return (value / step).round() * step * scale
