"""Quantisation to e4m3 in Triton, with one float32 scale for each block of neighbouring values.

Hopper's FP8 tensor cores read both operands along the dim that the GEMM sums over. So every operand is written
contiguous along that dim, transposed if necessary, and padded with zeros to whole blocks: GEMMs load it directly.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.quantization.formats import E4M3_MAX, MIN_AMAX
from moefold.ops.triton.grouped_gemm import gather_row


@dataclass(frozen=True)
class QuantizedTensor:
    """Operand of a scaled GEMM: quantised values and the scales of their blocks.

    M is the outer dim and K the dim that the GEMM sums over, padded to whole blocks.
    """

    values: Tensor
    """e4m3 [M, K], contiguous. Weights are [E, M, K]."""
    scales: Tensor
    """float32 [K/block, M], for weights [E, M/block, K/block]."""


@triton.jit
def scale_of(amax, zero, max_value, min_amax):
    """Return the scale of blocks: their amax becomes the largest value of the format.

    `zero` is the sum of 0 times the values: NaN in blocks with an infinity or a NaN, which the amax may ignore.
    """
    return tl.math.div_rn(tl.maximum(amax, min_amax), max_value) + zero


@triton.jit
def round_to_e4m3(value, scale, max_value):
    """Divide by the scale and round to the nearest e4m3 value, ties to even, but stay in float32: the cast is exact.

    Adding 1.5 * 2**20 times the power of two below the value puts the last bit of the sum at the third mantissa bit.
    Below 2**-6 all e4m3 values are multiples of 2**-9. Needed because Triton's interpreter does not round casts
    correctly.
    """
    value = tl.math.div_rn(value, scale)
    value = tl.minimum(tl.maximum(value, -max_value), max_value)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (value + shift) - shift


@triton.jit
def _quantize_rows_kernel(
    x, source, values, scales, num_rows, width, padded_width, stride_xr, max_value, min_amax,
    GATHERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    from_row, is_read = gather_row(source, row, is_row, GATHERS)
    is_column = column < width
    value = tl.load(
        x + from_row[:, None] * stride_xr + column[None, :], mask=is_read[:, None] & is_column[None, :], other=0.0
    ).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(value), 1), tl.sum(value * 0.0, 1), max_value, min_amax)
    value = round_to_e4m3(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)), max_value)
    cell = row.to(tl.int64)[:, None] * padded_width + column[None, :]
    tl.store(values + cell, value.to(values.dtype.element_ty), mask=is_row[:, None])
    tl.store(scales + tl.program_id(1).to(tl.int64) * num_rows + row, scale, mask=is_row)


@triton.jit
def _quantize_columns_kernel(
    x, source, values, scales, offsets, num_experts, width, padded_rows, stride_xr, max_value, min_amax,
    GATHERS: tl.constexpr, BLOCK: tl.constexpr, NUM_EXPERTS: tl.constexpr,
):  # fmt: skip
    """Quantise a block of an expert's rows along the rows and transpose it. NUM_EXPERTS is a power of two."""
    block = tl.program_id(0)
    e = tl.arange(0, NUM_EXPERTS)
    next_block = tl.load(offsets + e, mask=e < num_experts, other=0) // BLOCK + e + 1
    expert = tl.sum(((next_block <= block) & (e < num_experts)).to(tl.int32), 0)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    first = start + (block - first_block(start, expert, BLOCK)) * BLOCK
    if first < stop:
        row = first + tl.arange(0, BLOCK)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_row = row < stop
        is_column = column < width
        from_row, is_read = gather_row(source, row, is_row, GATHERS)
        value = tl.load(
            x + from_row[:, None] * stride_xr + column[None, :], mask=is_read[:, None] & is_column[None, :], other=0.0
        ).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(value), 0), tl.sum(value * 0.0, 0), max_value, min_amax)
        rounded = round_to_e4m3(value, tl.broadcast_to(scale[None, :], (BLOCK, BLOCK)), max_value)
        to_row = block * BLOCK + tl.arange(0, BLOCK)
        cell = column.to(tl.int64)[None, :] * padded_rows + to_row[:, None]
        tl.store(values + cell, rounded.to(values.dtype.element_ty), mask=is_column[None, :])
        tl.store(scales + block.to(tl.int64) * width + column, scale, mask=is_column)


@triton.jit
def first_block(start, expert, BLOCK: tl.constexpr):
    """Return the index of an expert's first block of rows, given its first row.

    Experts begin at whole blocks. Each has at most one incomplete block, so that this leaves enough room for the
    blocks of all experts before it, and needs no sum over them.
    """
    return start // BLOCK + expert


@triton.jit
def _quantize_weights_kernel(
    w, values, scales, depth, width, padded_depth, stride_we, stride_wk, stride_wn, max_value, min_amax,
    BLOCK: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.program_id(2).to(tl.int64)
    is_n = n < width
    value = tl.load(
        w + expert * stride_we + k[:, None] * stride_wk + n[None, :] * stride_wn,
        mask=(k < depth)[:, None] & is_n[None, :],
        other=0.0,
    ).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(value), 1), 0)
    scale = scale_of(amax, tl.sum(tl.sum(value * 0.0, 1), 0), max_value, min_amax)
    value = round_to_e4m3(value, tl.zeros_like(value) + scale, max_value)
    cell = (expert * width + n)[None, :] * padded_depth + k[:, None]
    tl.store(values + cell, value.to(values.dtype.element_ty), mask=is_n[None, :])
    tl.store(scales + (expert * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0), scale)


def quantize_rows(x: Tensor, num_rows: int, source_R: Tensor | None, block_size: int) -> QuantizedTensor:
    """Quantise rows in blocks [1, block] for a GEMM over the columns: M is R, K the columns.

    Args:
        x: rows of unit stride, [R, K], or [any, K] with `source_R`.
        num_rows: R.
        source_R: index into `x` of each row, int [R], or -1 for zeros.
        block_size: a power of two.
    """
    rows = _empty_operand(num_rows, x.shape[1], block_size, x.device)
    num_blocks = len(rows.scales)
    tile_rows = 16
    if rows.values.numel():
        _quantize_rows_kernel[(triton.cdiv(num_rows, tile_rows), num_blocks)](
            x, source_R if source_R is not None else rows.scales, rows.values, rows.scales, num_rows, x.shape[1],
            num_blocks * block_size, x.stride(0), E4M3_MAX, MIN_AMAX,
            GATHERS=source_R is not None, ROWS=tile_rows, BLOCK=block_size,
        )  # fmt: skip
    return rows


def quantize_columns(
    x: Tensor, num_rows: int, source_R: Tensor | None, offsets_E: Tensor, block_size: int
) -> QuantizedTensor:
    """Quantise in blocks [block, 1] of each expert's rows for a GEMM over the rows: M is the columns.

    Args:
        x: rows of unit stride, [R, K], or [any, K] with `source_R`.
        num_rows: R.
        source_R: index into `x` of each row, int [R], or -1 for zeros.
        offsets_E: end offset of each expert's rows, int32 [E].
        block_size: a power of two.

    Returns:
        Rows of expert e begin at block `first_block` and are padded with zeros to whole blocks. The space between the
        blocks of two experts is not written.
    """
    # Space for one incomplete block of each expert.
    padded_rows = (num_rows // block_size + len(offsets_E)) * block_size if num_rows else 0
    width = x.shape[1]
    columns = _empty_operand(width, padded_rows, block_size, x.device)
    if columns.values.numel():
        _quantize_columns_kernel[(padded_rows // block_size, triton.cdiv(width, block_size))](
            x, source_R if source_R is not None else offsets_E, columns.values, columns.scales, offsets_E,
            len(offsets_E), width, padded_rows, x.stride(0), E4M3_MAX, MIN_AMAX, GATHERS=source_R is not None,
            BLOCK=block_size, NUM_EXPERTS=triton.next_power_of_2(len(offsets_E)), num_warps=8,
        )  # fmt: skip
    return columns


def quantize_weights(w_EKN: Tensor, block_size: int) -> QuantizedTensor:
    """Quantise matrices in blocks [block, block] for a GEMM over K: M is N.

    Args:
        w_EKN: any strides.
        block_size: a power of two.
    """
    num_experts, depth, width = w_EKN.shape
    blocks_k = triton.cdiv(depth, block_size)
    blocks_n = triton.cdiv(width, block_size)
    weights = QuantizedTensor(
        torch.empty(num_experts, width, blocks_k * block_size, dtype=torch.float8_e4m3fn, device=w_EKN.device),
        torch.empty(num_experts, blocks_n, blocks_k, dtype=torch.float32, device=w_EKN.device),
    )
    if weights.values.numel():
        _quantize_weights_kernel[(blocks_k, blocks_n, num_experts)](
            w_EKN, weights.values, weights.scales, depth, width, blocks_k * block_size, *w_EKN.stride(),
            E4M3_MAX, MIN_AMAX, BLOCK=block_size, num_warps=8,
        )  # fmt: skip
    return weights


def _empty_operand(outer: int, depth: int, block_size: int, device: torch.device) -> QuantizedTensor:
    num_blocks = triton.cdiv(depth, block_size)
    return QuantizedTensor(
        torch.empty(outer, num_blocks * block_size, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_blocks, outer, dtype=torch.float32, device=device),
    )
