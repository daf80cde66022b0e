"""Gate and up projections of the routed experts in one grouped GEMM with two matrices, activation in its epilogue.

Each tile of the input is read once for both projections, and the hidden values are computed from the accumulators:
without saved projections only they are written. Accumulation is in float32.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.expert_ops import ExpertWeights
from moefold.ops.triton.grouped_gemm import (
    GROUP_SIZE_M,
    TileConfig,
    dot_precision,
    gather_row,
    max_programs,
    swizzled_tile,
    tile_configs,
    upcasts,
)
from moefold.ops.triton.swiglu import activation_and_slopes

TILE_CONFIGS_16_BIT = (
    TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
    TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
)
"""Candidates in 16-bit dtypes. A tile has two accumulators of block_m x block_n."""
TILE_CONFIGS_32_BIT = (TileConfig(block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3),)
"""Candidates in float32."""


@dataclass(frozen=True)
class Fc1Output:
    """Output tensors of the kernel, or None if not written."""

    hidden_RF: Tensor | None
    g_RF: Tensor | None
    u_RF: Tensor | None

    @property
    def projections(self) -> tuple[Tensor, ...]:
        """Both projections, or None."""
        return () if self.g_RF is None or self.u_RF is None else (self.g_RF, self.u_RF)


@triton.jit
def _fc1_kernel(
    x, w_gate, w_up, b_gate, b_up, probs, g_out, u_out, hidden_out, offsets, source, num_experts, width, depth,
    stride_xr, stride_xk, stride_we, stride_wk, stride_wn, alpha, limit,
    GATHERS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PROBS: tl.constexpr, IS_CLAMPED: tl.constexpr,
    WRITES_FC1: tl.constexpr, WRITES_HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, UPCASTS: tl.constexpr,
):  # fmt: skip
    """Compute g[r] = x[source[r]] @ w_gate[expert of r], u[r] in the same way, and activation(g, u) * probs."""
    tile = tl.program_id(0)
    num_programs = tl.num_programs(0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
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
            is_column = column < width
            from_row, is_read = gather_row(source, row, is_row, GATHERS)
            g = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            u = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for first in range(0, depth, BLOCK_K):
                is_inner = first + inner < depth
                a = tl.load(
                    x + from_row[:, None] * stride_xr + (first + inner)[None, :] * stride_xk,
                    mask=is_read[:, None] & is_inner[None, :],
                    other=0.0,
                )
                cell = (first + inner)[:, None] * stride_wk + column[None, :] * stride_wn
                is_weight = is_inner[:, None] & is_column[None, :]
                b = tl.load(w_gate + cell, mask=is_weight, other=0.0)
                c = tl.load(w_up + cell, mask=is_weight, other=0.0)
                if UPCASTS:
                    a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
                g = tl.dot(a, b, g, input_precision=PRECISION)
                u = tl.dot(a, c, u, input_precision=PRECISION)
            if HAS_BIAS:
                g += tl.load(b_gate + expert * width + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
                u += tl.load(b_up + expert * width + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            cell = row.to(tl.int64)[:, None] * width + column[None, :]
            is_cell = is_row[:, None] & is_column[None, :]
            g = g.to(x.dtype.element_ty)
            u = u.to(x.dtype.element_ty)
            if WRITES_FC1:
                tl.store(g_out + cell, g, mask=is_cell)
                tl.store(u_out + cell, u, mask=is_cell)
            if WRITES_HIDDEN:
                # Computed from the rounded projections, as in the backward pass with saved projections.
                hidden, _, _ = activation_and_slopes(g.to(tl.float32), u.to(tl.float32), alpha, limit, IS_CLAMPED)
                if HAS_PROBS:
                    hidden *= tl.load(probs + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
                tl.store(hidden_out + cell, hidden.to(x.dtype.element_ty), mask=is_cell)
            tile += num_programs
        first_tile = last_tile
        start = stop
        w_gate += stride_we
        w_up += stride_we


def fc1_tile_configs(x: Tensor) -> tuple[TileConfig, ...]:
    """Return the tile configs worth measuring, the best guess first."""
    return tile_configs(x, TILE_CONFIGS_16_BIT, TILE_CONFIGS_32_BIT)


def fc1(
    x: Tensor,
    weights: ExpertWeights,
    offsets_E: Tensor,
    out: Fc1Output,
    *,
    source_R: Tensor | None = None,
    probs_R: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    tile_config: TileConfig | None = None,
) -> None:
    """Compute gate and up projections of each row, and the hidden values, without a wait of the host.

    Args:
        x: rows of unit stride, [R, H], or [any, H] with `source_R`.
        weights: weights of the experts. Gate and up matrices have the same strides.
        offsets_E: end offset of each expert's rows, int32 [E] on the device. The last is at most R.
        out: contiguous tensors to write, at least one, and both projections or none of them. Rows after the last offset
            are not written.
        source_R: index into `x` of each row, int [R], or -1 for a row of zeros.
        probs_R: factor of each row of the hidden values. None means 1.
        clamp: (alpha, limit) of the clamped activation. None: SwiGLU.
        tile_config: tile sizes. None means the first of `fc1_tile_configs`.
    """
    w_gate = weights.gate_EHF
    w_up = weights.up_EHF
    assert w_gate.stride() == w_up.stride(), "both matrices need the same strides"
    written = out.hidden_RF if out.g_RF is None else out.g_RF
    assert written is not None, "nothing to write"
    num_experts, depth, width = w_gate.shape
    num_rows = len(written)
    if written.numel() == 0:
        return
    config = tile_config or fc1_tile_configs(x)[0]
    has_bias = weights.gate_bias_EF is not None
    # Each expert may have one partial tile.
    max_tiles = (triton.cdiv(num_rows, config.block_m) + num_experts) * triton.cdiv(width, config.block_n)
    _fc1_kernel[(min(max_tiles, max_programs(x, config.num_warps)),)](
        x, w_gate, w_up, _pointer(weights.gate_bias_EF, x), _pointer(weights.up_bias_EF, x), _pointer(probs_R, x),
        _pointer(out.g_RF, x), _pointer(out.u_RF, x), _pointer(out.hidden_RF, x), offsets_E,
        offsets_E if source_R is None else source_R, num_experts, width, depth,
        x.stride(0), x.stride(1), *w_gate.stride(), *(clamp or (0.0, 0.0)),
        GATHERS=source_R is not None, HAS_BIAS=has_bias, HAS_PROBS=probs_R is not None, IS_CLAMPED=clamp is not None,
        WRITES_FC1=out.g_RF is not None, WRITES_HIDDEN=out.hidden_RF is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_SIZE=GROUP_SIZE_M,
        PRECISION=dot_precision(x.dtype), UPCASTS=upcasts(x), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _pointer(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return a contiguous tensor for the kernel, or a placeholder for a tensor that it does not access."""
    return placeholder if tensor is None else tensor.contiguous()
