"""Quantisation to e4m3 in Triton, with one float32 scale for each block of neighbouring values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.quantization.formats import E4M3_MAX, MIN_AMAX
from moefold.ops.triton.grouped_gemm import gather_row


@triton.jit
def _round_to_e4m3(value, max_value):
    """Round to the nearest e4m3 value, ties to even, but stay in float32, so that the following cast is exact.

    Adding 1.5 * 2**20 times the power of two below the value puts the last bit of the sum at the third mantissa bit;
    below 2**-6 all e4m3 values are multiples of 2**-9. Needed because Triton's interpreter does not round casts
    correctly.
    """
    value = tl.minimum(tl.maximum(value, -max_value), max_value)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (value + shift) - shift


@triton.jit
def _quantize_rowwise_kernel(
    x, source, quantized, scales, num_rows, width, stride_xr, max_value, min_amax,
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
    amax = tl.max(tl.abs(value), 1)
    scale = tl.math.div_rn(tl.maximum(amax, min_amax), max_value)
    value = tl.math.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    value = _round_to_e4m3(value, max_value)
    cell = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(quantized + cell, value.to(quantized.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
    tl.store(scales + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), scale, mask=is_row)


@triton.jit
def _quantize_columnwise_kernel(
    x, source, quantized, scales, offsets, block_offsets, num_experts, width, stride_xr, max_value, min_amax,
    GATHERS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = 0
    for e in range(num_experts):
        expert += (tl.load(block_offsets + e) <= block).to(tl.int32)
    if expert < num_experts:
        first_block = tl.load(block_offsets + expert - 1, mask=expert > 0, other=0)
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(offsets + expert)
        row = start + (block - first_block) * BLOCK + tl.arange(0, BLOCK)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < stop
        is_column = column < width
        from_row, is_read = gather_row(source, row, is_row, GATHERS)
        value = tl.load(
            x + from_row[:, None] * stride_xr + column[None, :], mask=is_read[:, None] & is_column[None, :], other=0.0
        ).to(tl.float32)
        scale = tl.math.div_rn(tl.maximum(tl.max(tl.abs(value), 0), min_amax), max_value)
        value = tl.math.div_rn(value, tl.broadcast_to(scale[None, :], (BLOCK, COLUMNS)))
        value = _round_to_e4m3(value, max_value)
        cell = row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(quantized + cell, value.to(quantized.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
        tl.store(scales + block.to(tl.int64) * width + column, scale, mask=is_column)


def quantize_rowwise(x: Tensor, num_rows: int, source_R: Tensor | None, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantise rows in blocks [1, block]: (e4m3 [R, K], float32 scales [R, K/block]).

    Args:
        x: rows of unit stride, [R, K], or [any, K] with `source_R`.
        num_rows: R.
        source_R: index into `x` of each row, int [R]; -1 for zeros.
        block_size: a power of two.
    """
    width = x.shape[1]
    blocks = triton.cdiv(width, block_size)
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, blocks, dtype=torch.float32, device=x.device)
    rows = 16
    if values.numel():
        _quantize_rowwise_kernel[(triton.cdiv(num_rows, rows), blocks)](
            x, source_R if source_R is not None else scales, values, scales, num_rows, width, x.stride(0), E4M3_MAX,
            MIN_AMAX, GATHERS=source_R is not None, ROWS=rows, BLOCK=block_size,
        )  # fmt: skip
    return values, scales


def quantize_columnwise(
    x: Tensor, num_rows: int, source_R: Tensor | None, offsets_E: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Quantise in blocks [block, 1], which restart with each expert: (e4m3 [R, K], float32 scales [blocks, K]).

    Args:
        x: rows of unit stride, [R, K], or [any, K] with `source_R`.
        num_rows: R.
        source_R: index into `x` of each row, int [R]; -1 for zeros.
        offsets_E: end offset of each expert's rows, int32 [E].
        block_size: a power of two.

    Returns:
        Blocks of experts in order, see `block_offsets`; the number of blocks is the maximum for R rows, and unused ones
        are not written.
    """
    width = x.shape[1]
    num_experts = len(offsets_E)
    max_blocks = num_rows // block_size + num_experts
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(max_blocks, width, dtype=torch.float32, device=x.device)
    columns = 64
    if values.numel():
        _quantize_columnwise_kernel[(max_blocks, triton.cdiv(width, columns))](
            x, source_R if source_R is not None else offsets_E, values, scales, offsets_E,
            block_offsets(offsets_E, block_size), num_experts, width, x.stride(0), E4M3_MAX, MIN_AMAX,
            GATHERS=source_R is not None, COLUMNS=columns, BLOCK=block_size,
        )  # fmt: skip
    return values, scales


def block_offsets(offsets_E: Tensor, block_size: int) -> Tensor:
    """Return the end offset of each expert's blocks, int32 [E], without a device sync."""
    counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
    return ((counts_E + block_size - 1) // block_size).cumsum(0, dtype=torch.int32)


def quantize_2d_blocks(w_EKN: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantise matrices in blocks [block, block]: (e4m3 [E, K, N], float32 scales [E, K/block, N/block]).

    The values are contiguous along K, as Hopper's tensor cores require of FP8 operands.
    """
    depth, width = w_EKN.shape[1:]
    padded = torch.nn.functional.pad(w_EKN.mT.to(torch.float32), (0, -depth % block_size, 0, -width % block_size))
    blocks = padded.unflatten(2, (-1, block_size)).unflatten(1, (-1, block_size))
    scales = blocks.abs().amax((2, 4), keepdim=True).clamp(min=MIN_AMAX) / E4M3_MAX
    values = (blocks / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(3, 4).flatten(1, 2)[:, :width, :depth].contiguous().mT, scales[:, :, 0, :, 0].mT
