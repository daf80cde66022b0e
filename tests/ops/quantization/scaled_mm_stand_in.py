"""A stand-in for `torch.nn.functional.scaled_mm` with scales of blocks, written only from public descriptions.

Each scale lies where cuBLAS's documentation ("1D block scaling factors layout") has it, element by element; e2m1 and
e8m0 have the values of the OCP microscaling formats. It checks the documented duties of its caller.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def offset(row: int, column: int, columns: int) -> int:
    """Return the place of the scale of a row and a block: its tile of 128 x 4, and the place in it."""
    tile = (row // 128) * (columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def row_major(row: int, column: int, columns: int) -> int:
    """Another layout, a wrong one."""
    return row * columns + column


def scaled_mm(
    a: Tensor,
    b: Tensor,
    *scaling: list[Any],
    output_dtype: torch.dtype,
    layout: Any = offset,
) -> Tensor:
    """A @ b in float64, then the asked type; `scaling` are scales and recipes of a and of b, then both swizzles."""
    scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b = scaling
    assert a.is_contiguous()
    assert b.t().is_contiguous(), "b lies by columns"
    left = _decoded(a, scale_a, recipe_a, swizzle_a, layout)
    right = _decoded(b.t(), scale_b, recipe_b, swizzle_b, layout)
    return (left @ right.t()).to(output_dtype)


def _decoded(values: Tensor, scales: list[Tensor], recipes: list[Any], swizzles: list[Any], layout: Any) -> Tensor:
    assert swizzles[0] == F.SwizzleType.SWIZZLE_32_4_4
    if recipes == [F.ScalingType.BlockWise1x32]:
        assert (values.dtype, scales[0].dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        wide, block, outer = values.double(), 32, 1.0
        stored = torch.exp2(scales[0].view(torch.uint8).double() - 127)
    else:
        assert recipes == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        assert swizzles[1] == F.SwizzleType.NO_SWIZZLE
        assert (values.dtype, scales[0].dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
        pairs = values.view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1).long()
        wide = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)[codes]
        block, outer, stored = 16, scales[1].double(), scales[0].double()
    rows, columns = wide.shape[0], wide.shape[1] // block
    assert rows % 128 == columns % 4 == 0
    assert scales[0].shape == (rows * columns,)
    places = torch.tensor([[layout(row, column, columns) for column in range(columns)] for row in range(rows)])
    return wide * (stored[places] * outer).repeat_interleave(block, 1)
