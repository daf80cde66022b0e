"""Grouped products of e4m3 operands with a float32 scale for each block (arXiv:2412.19437 sec. 3.3.2), in Triton.

Each partial sum over a block is taken by the matrix units, then multiplied by the two scales and added in float32: the
promotion of partial sums that DeepSeek-V3 makes every 128 terms comes by itself.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moefold.kernels.triton_grouped import GROUP_SIZE_M, max_programs, swizzled_tile


@dataclass(frozen=True)
class QuantizedTensor:
    """Values of few bits and their scales."""

    values: Tensor
    scales: Tensor


@triton.jit
def _scaled_gemm_kernel(
    x, x_scales, w, w_scales, y, offsets, num_experts, width, depth,
    stride_we, stride_wk, stride_wn, stride_se, stride_sk, stride_sn, num_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Y[r] = x[r] @ w[expert of r]; x and y are contiguous."""
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    inner = tl.arange(0, BLOCK)
    start = 0
    first_tile = 0
    for expert in range(num_experts):
        stop = tl.load(offsets + expert)
        tiles_m = tl.cdiv(stop - start, BLOCK_M)
        last_tile = first_tile + tiles_m * tiles_n
        while tile < last_tile:
            m, n = swizzled_tile(tile - first_tile, tiles_m, tiles_n, GROUP_SIZE)
            row = (start + m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            is_row = row < stop
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = column < width
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for block in range(num_blocks):
                k = block * BLOCK + inner
                a = tl.load(
                    x + row[:, None] * depth + k[None, :], mask=is_row[:, None] & (k < depth)[None, :], other=0.0
                )
                b = tl.load(
                    w + k[:, None] * stride_wk + column[None, :] * stride_wn,
                    mask=(k < depth)[:, None] & is_column[None, :],
                    other=0.0,
                )
                a_scale = tl.load(x_scales + row * num_blocks + block, mask=is_row, other=0.0)
                b_scale = tl.load(w_scales + block * stride_sk + n * BLOCK_N // BLOCK * stride_sn)
                acc += tl.dot(a, b) * (a_scale * b_scale)[:, None]
            cell = y + row[:, None] * width + column[None, :]
            tl.store(cell, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
            tile += tl.num_programs(0)
        first_tile = last_tile
        start = stop
        w += stride_we
        w_scales += stride_se


@triton.jit
def _scaled_weight_grad_kernel(
    x, x_scales, grad, grad_scales, out, offsets, block_offsets, depth, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Out[e] = x[rows of e].T @ grad[rows of e]; all contiguous, rounded along rows."""
    tiles_n = tl.cdiv(width, BLOCK_N)
    tiles_m = tl.cdiv(depth, BLOCK_M)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    line = (tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(offsets + expert)
    block = tl.load(block_offsets + expert - 1, mask=expert > 0, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, stop, BLOCK):
        row = (first + tl.arange(0, BLOCK)).to(tl.int64)
        is_row = row < stop
        a = tl.load(x + row[None, :] * depth + line[:, None], mask=is_row[None, :] & (line < depth)[:, None], other=0.0)
        b = tl.load(
            grad + row[:, None] * width + column[None, :], mask=is_row[:, None] & (column < width)[None, :], other=0.0
        )
        a_scale = tl.load(x_scales + block * depth + line, mask=line < depth, other=0.0)
        b_scale = tl.load(grad_scales + block * width + column, mask=column < width, other=0.0)
        acc += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        block += 1
    cell = expert.to(tl.int64) * depth * width + line[:, None] * width + column[None, :]
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=(line < depth)[:, None] & (column < width)[None, :])


def scaled_grouped_gemm(
    x: QuantizedTensor, w: QuantizedTensor, offsets_E: Tensor, block_size: int, out: Tensor
) -> Tensor:
    """Each row times the matrix of its expert, [R, N]; waits for nothing.

    Args:
        x: [R, K], rounded along columns.
        w: [E, K, N] in squares, any strides.
        offsets_E: where the rows of each expert end, int32 [E]; the last is R.
        block_size: length of the blocks.
        out: the result, contiguous.
    """
    num_experts, depth, width = w.values.shape
    num_rows = len(x.values)
    if num_rows == 0 or width == 0:
        return out
    tile_m, tile_n, warps = (128, 128, 8) if out.is_cuda else (16, 16, 4)
    most_tiles = (triton.cdiv(num_rows, tile_m) + num_experts) * triton.cdiv(width, tile_n)
    _scaled_gemm_kernel[(min(most_tiles, max_programs(out)),)](
        x.values, x.scales, w.values, w.scales, out, offsets_E, num_experts, width, depth, *w.values.stride(),
        *w.scales.stride(), triton.cdiv(depth, block_size), BLOCK_M=tile_m, BLOCK_N=min(tile_n, block_size), BLOCK=block_size,
        GROUP_SIZE=GROUP_SIZE_M, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def scaled_grouped_gemm_weight_grad(
    x: QuantizedTensor, grad: QuantizedTensor, offsets_E: Tensor, block_offsets_E: Tensor, block_size: int, out: Tensor
) -> Tensor:
    """The gradient of the matrices, [E, K, N]; 0 for an expert without rows.

    Args:
        x: [R, K], rounded along rows.
        grad: [R, N], rounded along rows.
        offsets_E: where the rows of each expert end, int32 [E].
        block_offsets_E: where their blocks end, int32 [E].
        block_size: length of the blocks.
        out: the result, contiguous.
    """
    num_experts, depth, width = out.shape
    tile_m, tile_n, warps = (128, 128, 8) if out.is_cuda else (16, 16, 4)
    num_tiles = num_experts * triton.cdiv(depth, tile_m) * triton.cdiv(width, tile_n)
    if num_tiles:
        _scaled_weight_grad_kernel[(num_tiles,)](
            x.values, x.scales, grad.values, grad.scales, out, offsets_E, block_offsets_E, depth, width,
            BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK=block_size, num_warps=warps, num_stages=3,
        )  # fmt: skip
    return out
