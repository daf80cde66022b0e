"""FP8 wire format of tokens in Triton: rows are packed and unpacked in one pass over memory.

The reference is `pack` and `unpack` in `ops/quantization/formats.py`: the bits are equal except for the sign of zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.expert_ops import unit_stride
from moefold.ops.quantization.formats import (
    E4M3_MAX,
    MIN_AMAX,
    SCALE_DTYPE,
    VALUE_DTYPE,
    WIRE_QUANT_FORMAT,
    pack,
    unpack,
)
from moefold.ops.triton.quantize import round_to_e4m3, scale_of

BLOCK = WIRE_QUANT_FORMAT.block_size
SCALE_BYTES = SCALE_DTYPE.itemsize
TILE_ROWS = 16


@triton.jit
def _pack_kernel(
    x, values, scales, num_rows, width, stride_x, stride_values, stride_scales, max_value, min_amax,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_cell = is_row[:, None] & (column < width)[None, :]
    row = row.to(tl.int64)
    value = tl.load(x + row[:, None] * stride_x + column[None, :], mask=is_cell, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), 1), tl.sum(value * 0.0, 1), max_value, min_amax)
    value = round_to_e4m3(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)), max_value)
    cell = values + row[:, None] * stride_values + column[None, :]
    tl.store(cell, value.to(values.dtype.element_ty), mask=is_cell)
    tl.store(scales + row * stride_scales + tl.program_id(1), scale, mask=is_row)


@triton.jit
def _unpack_kernel(
    values, scales, rows, num_rows, width, stride_values, stride_scales, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_cell = is_row[:, None] & (column < width)[None, :]
    row = row.to(tl.int64)
    value = tl.load(values + row[:, None] * stride_values + column[None, :], mask=is_cell, other=0.0).to(tl.float32)
    scale = tl.load(scales + row * stride_scales + tl.program_id(1), mask=is_row, other=0.0)
    cell = rows + row[:, None] * width + column[None, :]
    tl.store(cell, (value * scale[:, None]).to(rows.dtype.element_ty), mask=is_cell)


def pack_rows(x_RH: Tensor) -> Tensor:
    """Compute `pack`, uint8 [R, H + 4 * ceil(H/128)], by torch's operations where the scales would be misaligned."""
    num_rows, width = x_RH.shape
    num_blocks = triton.cdiv(width, BLOCK)
    if width % SCALE_BYTES or not x_RH.numel():
        return pack(x_RH)
    x = unit_stride(x_RH)
    packed = torch.empty(num_rows, width + SCALE_BYTES * num_blocks, dtype=torch.uint8, device=x.device)
    values, scales = _views(packed, width)
    _pack_kernel[(triton.cdiv(num_rows, TILE_ROWS), num_blocks)](
        x, values, scales, num_rows, width, x.stride(0), values.stride(0), scales.stride(0), E4M3_MAX, MIN_AMAX,
        ROWS=TILE_ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return packed


def unpack_rows(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Compute `unpack`, [R, H], by torch's operations where the scales are misaligned."""
    num_rows = len(packed)
    if width % SCALE_BYTES or not packed.numel():
        return unpack(packed, width, dtype)
    values, scales = _views(packed.contiguous(), width)
    rows = torch.empty(num_rows, width, dtype=dtype, device=packed.device)
    _unpack_kernel[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(width, BLOCK))](
        values, scales, rows, num_rows, width, values.stride(0), scales.stride(0), ROWS=TILE_ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    return rows


def _views(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the values and the scales of packed rows."""
    return packed[:, :width].view(VALUE_DTYPE), packed[:, width:].view(SCALE_DTYPE)
