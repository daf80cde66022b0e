"""Grouped GEMMs in Triton with persistent programs: rows sorted by expert times the matrices of their experts.

Expert offsets are read on the device, so there is no host sync. Rows may be gathered on read and scattered on write:
permuted tokens need no buffer. Accumulation is in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_SIZE_M = 8
"""Row tiles that share the columns of a matrix in the cache (grouped ordering of the Triton tutorials)."""


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes and launch options of a GEMM kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


INTERPRETER_TILE_CONFIG = TileConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=1)
"""Small tiles for the interpreter, which runs programs sequentially, so that small tests have many edges."""
TILE_CONFIGS_16_BIT = (
    TileConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3),
    TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
    TileConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4),
)
"""Candidates in 16-bit dtypes. The last suits fine-grained experts with few rows."""
TILE_CONFIGS_32_BIT = (TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3),)
"""Candidates in float32, whose tiles need twice the shared memory."""


@triton.jit
def swizzled_tile(index, tiles_m, tiles_n, GROUP_SIZE: tl.constexpr):
    """Return (row tile, column tile) of a tile index: GROUP_SIZE row tiles share a pass over all columns."""
    band = GROUP_SIZE * tiles_n
    first_m = index // band * GROUP_SIZE
    height = tl.minimum(tiles_m - first_m, GROUP_SIZE)
    return first_m + index % band % height, index % band // height


@triton.jit
def gather_row(source, row, is_row, GATHERS: tl.constexpr):
    """Return (row to read, mask): with GATHERS source[row], masked where source[row] is -1."""
    from_row = row.to(tl.int64)
    is_read = is_row
    if GATHERS:
        from_row = tl.load(source + row, mask=is_row, other=-1).to(tl.int64)
        is_read = from_row >= 0
    return from_row, is_read


@triton.jit
def _accumulate(
    acc, x, w, row, is_row, column, width, depth, stride_xr, stride_xk, stride_wk, stride_wn, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Return acc + x[row] @ w[:, column], in float32."""
    inner = tl.arange(0, BLOCK_K)
    x_row = row * stride_xr
    # 32-bit offsets from a pointer that advances: tiles of 64-bit addresses would not fit into the registers.
    w_offset = inner[:, None] * stride_wk + column[None, :] * stride_wn
    for first in range(0, depth, BLOCK_K):
        is_inner = first + inner < depth
        a = tl.load(
            x + x_row[:, None] + (first + inner)[None, :] * stride_xk,
            mask=is_row[:, None] & is_inner[None, :],
            other=0.0,
        )
        b = tl.load(w + w_offset, mask=is_inner[:, None] & (column < width)[None, :], other=0.0)
        w += BLOCK_K * stride_wk
        if UPCASTS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _grouped_gemm_kernel(
    x, w, y, offsets, source, target, x_second, w_second, num_experts, width, depth,
    stride_xr, stride_xk, stride_we, stride_wk, stride_wn, stride_yr,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr, HAS_SECOND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Compute y[r], or y[target[r]], = x[source[r]] @ w[expert of r] (+ the product of the second pair)."""
    tile = tl.program_id(0)
    num_programs = tl.num_programs(0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    start = 0
    first_tile = 0
    for expert in range(num_experts):
        stop = tl.load(offsets + expert)
        tiles_m = tl.cdiv(stop - start, BLOCK_M)
        last_tile = first_tile + tiles_m * tiles_n
        while tile < last_tile:
            m, n = swizzled_tile(tile - first_tile, tiles_m, tiles_n, GROUP_SIZE)
            row = start + m * BLOCK_M + tl.arange(0, BLOCK_M)
            is_row = row < stop
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            from_row, is_read = gather_row(source, row, is_row, GATHERS)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = _accumulate(
                acc, x, w, from_row, is_read, column, width, depth,
                stride_xr, stride_xk, stride_wk, stride_wn, BLOCK_K, PRECISION, UPCASTS,
            )  # fmt: skip
            if HAS_SECOND:
                acc = _accumulate(
                    acc, x_second, w_second, from_row, is_read, column, width, depth,
                    stride_xr, stride_xk, stride_wk, stride_wn, BLOCK_K, PRECISION, UPCASTS,
                )  # fmt: skip
            to_row = row.to(tl.int64)
            if SCATTERS:
                to_row = tl.load(target + row, mask=is_row, other=0).to(tl.int64)
            cell = y + to_row[:, None] * stride_yr + column[None, :]
            tl.store(cell, acc.to(y.dtype.element_ty), mask=is_row[:, None] & (column < width)[None, :])
            tile += num_programs
        first_tile = last_tile
        start = stop
        w += stride_we
        w_second += stride_we


@triton.jit
def _weight_grad_kernel(
    x, grad, out, offsets, depth, width, stride_xr, stride_gr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):  # fmt: skip
    """Compute out[e] = x[rows of e].T @ grad[rows of e]. Return zero for an expert without rows."""
    tiles_n = tl.cdiv(width, BLOCK_N)
    tiles_m = tl.cdiv(depth, BLOCK_M)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    line = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(offsets + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, stop, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        is_row = row < stop
        from_row = row.to(tl.int64)
        a = tl.load(
            x + from_row[None, :] * stride_xr + line[:, None], mask=is_row[None, :] & (line < depth)[:, None], other=0.0
        )
        b = tl.load(
            grad + from_row[:, None] * stride_gr + column[None, :],
            mask=is_row[:, None] & (column < width)[None, :],
            other=0.0,
        )
        if UPCASTS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    cell = expert.to(tl.int64) * depth * width + line.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=(line < depth)[:, None] & (column < width)[None, :])


@triton.jit
def _combine_kernel(
    rows, second, row_ids, kept, probs, out, num_tokens, top_k, width, stride_r,
    HAS_SECOND: tl.constexpr, HAS_KEPT_MASK: tl.constexpr, HAS_PROBS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out[t] = sum over k of probs[t, k] * (rows + second)[row_ids[t, k]], in the order of k."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = token < num_tokens
    is_column = column < width
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for k in range(top_k):
        index = token * top_k + k
        is_read = is_token
        if HAS_KEPT_MASK:
            is_read = is_read & (tl.load(kept + index, mask=is_token, other=0) != 0)
        row = tl.load(row_ids + index, mask=is_read, other=0).to(tl.int64)
        cell = row[:, None] * stride_r + column[None, :]
        is_cell = is_read[:, None] & is_column[None, :]
        value = tl.load(rows + cell, mask=is_cell, other=0.0).to(tl.float32)
        if HAS_SECOND:
            value += tl.load(second + cell, mask=is_cell, other=0.0).to(tl.float32)
        if HAS_PROBS:
            value *= tl.load(probs + index, mask=is_token, other=0.0).to(tl.float32)[:, None]
        acc += value
    cell = out + token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(cell, acc.to(out.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])


def dot_precision(dtype: torch.dtype) -> str:
    """Return tl.dot's input precision for float32, as set for torch. Other dtypes ignore it."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def tile_configs(
    x: Tensor,
    for_16_bit: tuple[TileConfig, ...] = TILE_CONFIGS_16_BIT,
    for_32_bit: tuple[TileConfig, ...] = TILE_CONFIGS_32_BIT,
) -> tuple[TileConfig, ...]:
    """Return the tile configs worth measuring for the dtype of x, the best guess first."""
    if not x.is_cuda:
        return (INTERPRETER_TILE_CONFIG,)
    return for_32_bit if x.element_size() > 2 else for_16_bit


def grouped_gemm(
    x: Tensor,
    w_EKN: Tensor,
    offsets_E: Tensor,
    *,
    source_R: Tensor | None = None,
    target_R: Tensor | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    tile_config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its expert, [R, N]. It does not communicate, and the host does not wait.

    Args:
        x: rows of unit stride, [R, K], or [any, K] with `source_R`.
        w_EKN: [E, K, N], any strides.
        offsets_E: end offset of each expert's rows, int32 [E] on the device. The last is at most R. Rows after it are
            not written.
        source_R: index into `x` of each row, int [R], or -1 for a row of zeros.
        target_R: row of the result that each row is written to, a permutation, int [R]. None means the same row.
        second: another x and w of the same strides, whose product is added.
        tile_config: tile sizes. None means the first of `tile_configs`.

    Returns:
        [R, N] in the dtype of x.
    """
    num_experts, depth, width = w_EKN.shape
    config = tile_config or tile_configs(x)[0]
    x_second, w_second = second or (x, w_EKN)
    assert (x_second.stride(), w_second.stride()) == (x.stride(), w_EKN.stride()), "both pairs need the same strides"
    num_rows = len(x) if source_R is None else len(source_R)
    y = x.new_empty(num_rows, width) if out is None else out
    if num_rows == 0 or width == 0:
        return y
    # Each expert may have one partial tile.
    max_tiles = (triton.cdiv(num_rows, config.block_m) + num_experts) * triton.cdiv(width, config.block_n)
    _grouped_gemm_kernel[(min(max_tiles, max_programs(x, config.num_warps)),)](
        x, w_EKN, y, offsets_E,
        offsets_E if source_R is None else source_R, offsets_E if target_R is None else target_R,
        x_second, w_second, num_experts, width, depth,
        x.stride(0), x.stride(1), *w_EKN.stride(), y.stride(0),
        GATHERS=source_R is not None, SCATTERS=target_R is not None, HAS_SECOND=second is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_SIZE=GROUP_SIZE_M,
        PRECISION=dot_precision(x.dtype), UPCASTS=upcasts(x), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y


def grouped_gemm_weight_grad(
    x: Tensor,
    grad: Tensor,
    offsets_E: Tensor,
    *,
    tile_config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the matrices, [E, K, N]: x.T @ grad over the rows of each expert, 0 without rows.

    Args:
        x: rows with unit stride, [R, K].
        grad: rows with unit stride, [R, N].
        offsets_E: end offset of each expert's rows, int32 [E] on the device.
        tile_config: tile sizes. None means the first of `tile_configs`.
    """
    depth = x.shape[1]
    width = grad.shape[1]
    num_experts = len(offsets_E)
    config = tile_config or tile_configs(x)[0]
    out = x.new_empty(num_experts, depth, width) if out is None else out
    num_tiles = num_experts * triton.cdiv(depth, config.block_m) * triton.cdiv(width, config.block_n)
    if num_tiles:
        _weight_grad_kernel[(num_tiles,)](
            x, grad, out, offsets_E, depth, width, x.stride(0), grad.stride(0),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PRECISION=dot_precision(x.dtype),
            UPCASTS=upcasts(x), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def combine_rows(
    rows_RH: Tensor,
    row_TK: Tensor,
    kept_TK: Tensor | None = None,
    probs_TK: Tensor | None = None,
    *,
    second_RH: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows, [T, H], in float32 and in the order of K: deterministic.

    Args:
        rows_RH: rows with unit stride.
        row_TK: row of each routed token, int [T, K].
        kept_TK: routed tokens to sum, bool [T, K]. None means all. The rows of other tokens are not read.
        probs_TK: weight of each routed token. None means 1.
        second_RH: added to the rows, of the same strides. None means 0.
    """
    assert second_RH is None or second_RH.stride() == rows_RH.stride(), "both need the same strides"
    num_tokens, top_k = row_TK.shape
    width = rows_RH.shape[1]
    out = rows_RH.new_empty(num_tokens, width) if out is None else out
    if num_tokens == 0 or width == 0:
        return out
    block_t, block_n = (8, 256) if rows_RH.is_cuda else (4, 32)
    kept = row_TK if kept_TK is None else kept_TK.to(torch.uint8).contiguous()
    probs = row_TK if probs_TK is None else probs_TK.contiguous()
    _combine_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(width, block_n))](
        rows_RH, rows_RH if second_RH is None else second_RH, row_TK.contiguous(), kept, probs, out,
        num_tokens, top_k, width, rows_RH.stride(0), HAS_SECOND=second_RH is not None,
        HAS_KEPT_MASK=kept_TK is not None, HAS_PROBS=probs_TK is not None, BLOCK_T=block_t, BLOCK_N=block_n,
    )  # fmt: skip
    return out


def upcasts(x: Tensor) -> bool:
    """Return whether to upcast: the interpreter does not support bfloat16 dots. float32 gives the same products."""
    return not x.is_cuda and x.dtype == torch.bfloat16


def max_programs(x: Tensor, num_warps: int) -> int:
    """Return the number of persistent programs: all that run at the same time, 3 in the interpreter.

    A multiprocessor has the registers of two programs of 4 warps, or of one of 8.
    """
    if not x.is_cuda:
        return 3
    programs_per_multiprocessor = 2 if num_warps <= 4 else 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count * programs_per_multiprocessor
