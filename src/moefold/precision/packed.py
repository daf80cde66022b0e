"""Rows of e4m3 as bytes, for the way between ranks: half of bfloat16 (arXiv:2412.19437 sec. 3.3.3).

The blocks and scales are those of `train.precision = "fp8-blockwise"` for activations, so that its products, which
round what they read, find the rows rounded already. A row is rounded by itself: it makes no difference on which rank,
nor among which other rows. Bytes, because gloo does not know the type.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.precision.recipe import RECIPES, rounded, scaled_blocks

RECIPE = RECIPES["fp8-blockwise"]
VALUE, SCALE = torch.float8_e4m3fn, torch.float32


def pack(x_RH: Tensor) -> Tensor:
    """Round rows to e4m3 in blocks [1, 128]: the values of a row, then its scales, uint8 [R, H + 4 * ceil(H/128)]."""
    values, scales = narrow(x_RH)
    return torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), 1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The rounded rows.

    Args:
        packed: of `pack`, or rows of zero bytes, which become zeros.
        width: H.
        dtype: of the result.

    Returns:
        [R, H].
    """
    # Cloned, as the scales need not begin at a multiple of their size.
    scales = packed[:, width:].clone(memory_format=torch.contiguous_format).view(SCALE)
    return widen(packed[:, :width].view(VALUE), scales, dtype)


def narrow(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of packed rows: (values e4m3 [R, H], scales float32 [R, ceil(H/128)])."""
    blocks, scales = scaled_blocks(x_RH, RECIPE)
    values = blocks.to(VALUE).flatten(1)[:, : x_RH.shape[1]]
    return values.contiguous(), scales.to(SCALE).flatten(1)


def widen(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of the two parts that `narrow` made, [R, H]."""
    rows, block = values.to(dtype), RECIPE.block
    # Multiplied in float32 at least and rounded once: a value of e4m3 is one of bfloat16, its scale is not.
    whole = rows.shape[1] // block * block
    rows[:, :whole].unflatten(1, (-1, block)).mul_(scales[:, : whole // block].unsqueeze(2))
    rows[:, whole:].mul_(scales[:, whole // block :])
    return rows


def round_as_packed(x_RH: Tensor) -> Tensor:
    """What `unpack` would make of `pack`; the gradient passes as if nothing were rounded."""
    return _Round.apply(x_RH)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor) -> Tensor:
        return rounded(x_RH, RECIPE).to(x_RH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> Tensor:
        return grad_RH
