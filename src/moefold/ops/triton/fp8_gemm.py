"""Blockwise FP8 grouped GEMMs in Triton: e4m3 operands, a float32 scale for each block (arXiv:2412.19437 sec. 3.3.2).

The tensor cores compute the partial sum over a block, which is then scaled and accumulated in float32: this includes
the promotion of partial sums that DeepSeek-V3 makes every 128 terms.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.autotune import Autotuner
from moefold.ops.expert_ops import GatheredRows, unit_stride
from moefold.ops.quantization.weight_cache import WeightCache
from moefold.ops.triton.experts import TritonExpertOps
from moefold.ops.triton.grouped_gemm import GROUP_SIZE_M, TileConfig, max_programs, swizzled_tile
from moefold.ops.triton.quantize import QuantizedTensor, first_block, quantize_columns, quantize_rows, quantize_weights


@triton.jit
def _scaled_gemm_kernel(
    x, x_scales, w, w_scales, y, offsets, num_experts, num_rows, width, depth, stride_we, stride_se, stride_sn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute y[r] = x[r] @ w[expert of r].T. All contiguous, the depth a whole number of blocks."""
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
            row = start + m * BLOCK_M + tl.arange(0, BLOCK_M)
            is_row = row < stop
            column = n * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = column < width
            x_cell = x + row.to(tl.int64)[:, None] * depth + inner[None, :]
            w_cell = w + column.to(tl.int64)[None, :] * depth + inner[:, None]
            x_scale_cell = x_scales + row
            w_scale_cell = w_scales + n * BLOCK_N // BLOCK * stride_sn
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for block in range(depth // BLOCK):
                a = tl.load(x_cell + block * BLOCK, mask=is_row[:, None], other=0.0)
                b = tl.load(w_cell + block * BLOCK, mask=is_column[None, :], other=0.0)
                a_scale = tl.load(x_scale_cell, mask=is_row, other=0.0)
                b_scale = tl.load(w_scale_cell + block)
                acc += tl.dot(a, b) * (a_scale * b_scale)[:, None]
                x_scale_cell += num_rows
            cell = y + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(cell, acc.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
            tile += tl.num_programs(0)
        first_tile = last_tile
        start = stop
        w += stride_we
        w_scales += stride_se


@triton.jit
def _scaled_weight_grad_kernel(
    x, x_scales, grad, grad_scales, out, offsets, depth, width, padded_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute out[e] = x[:, blocks of e] @ grad[:, blocks of e].T, all contiguous."""
    tiles_m = tl.cdiv(depth, BLOCK_M)
    tiles_n = tl.cdiv(width, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    m, n = swizzled_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_SIZE)
    line = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_line = line < depth
    is_column = column < width
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(offsets + expert)
    first = first_block(start, expert, BLOCK)
    inner = first * BLOCK + tl.arange(0, BLOCK)
    x_cell = x + line.to(tl.int64)[:, None] * padded_rows + inner[None, :]
    grad_cell = grad + column.to(tl.int64)[None, :] * padded_rows + inner[:, None]
    x_scale_cell = x_scales + first.to(tl.int64) * depth + line
    grad_scale_cell = grad_scales + first.to(tl.int64) * width + column
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(tl.cdiv(stop - start, BLOCK)):
        a = tl.load(x_cell + block * BLOCK, mask=is_line[:, None], other=0.0)
        b = tl.load(grad_cell + block * BLOCK, mask=is_column[None, :], other=0.0)
        a_scale = tl.load(x_scale_cell, mask=is_line, other=0.0)
        b_scale = tl.load(grad_scale_cell, mask=is_column, other=0.0)
        acc += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        x_scale_cell += depth
        grad_scale_cell += width
    cell = out + (expert.to(tl.int64) * depth + line)[:, None] * width + column[None, :]
    tl.store(cell, acc.to(out.dtype.element_ty), mask=is_line[:, None] & is_column[None, :])


def scaled_grouped_gemm(x: QuantizedTensor, w: QuantizedTensor, offsets_E: Tensor, out: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert, [R, N], without a device sync.

    Args:
        x: result of `quantize_rows`, [R, K].
        w: result of `quantize_weights`, [E, N, K].
        offsets_E: end offset of each expert's rows, int32 [E]. The last is at most R.
        out: output tensor, contiguous.
    """
    num_experts, width, depth = w.values.shape
    num_rows = len(x.values)
    if num_rows == 0 or width == 0:
        return out
    block_size = depth // len(x.scales)
    tile_m, tile_n, warps = (128, 128, 8) if out.is_cuda else (16, 16, 4)
    max_tiles = (triton.cdiv(num_rows, tile_m) + num_experts) * triton.cdiv(width, tile_n)
    _scaled_gemm_kernel[(min(max_tiles, max_programs(out, warps)),)](
        x.values, x.scales, w.values, w.scales, out, offsets_E, num_experts, num_rows, width, depth,
        w.values.stride(0), *w.scales.stride()[:2], BLOCK_M=tile_m, BLOCK_N=min(tile_n, block_size), BLOCK=block_size,
        GROUP_SIZE=GROUP_SIZE_M, num_warps=warps, num_stages=4,
    )  # fmt: skip
    return out


def scaled_grouped_gemm_weight_grad(
    x: QuantizedTensor, grad: QuantizedTensor, offsets_E: Tensor, out: Tensor
) -> Tensor:
    """Compute the gradient of the matrices, [E, K, N], or 0 for an expert without rows.

    Args:
        x: result of `quantize_columns`, [K, R].
        grad: result of `quantize_columns`, [N, R].
        offsets_E: end offset of each expert's rows, int32 [E].
        out: output tensor, contiguous.
    """
    num_experts, depth, width = out.shape
    padded_rows = x.values.shape[1]
    tile_m, tile_n, warps = (128, 128, 8) if out.is_cuda else (16, 16, 4)
    num_tiles = num_experts * triton.cdiv(depth, tile_m) * triton.cdiv(width, tile_n)
    if num_tiles and padded_rows == 0:
        return out.zero_()
    if num_tiles:
        _scaled_weight_grad_kernel[(num_tiles,)](
            x.values, x.scales, grad.values, grad.scales, out, offsets_E, depth, width, padded_rows,
            BLOCK_M=tile_m, BLOCK_N=tile_n, BLOCK=padded_rows // len(x.scales), GROUP_SIZE=GROUP_SIZE_M,
            num_warps=warps, num_stages=4,
        )  # fmt: skip
    return out


class Fp8ExpertOps(TritonExpertOps):
    """`TritonExpertOps` whose GEMMs quantise both operands to e4m3.

    Args:
        block_size: values that share a scale.
        weight_cache: keeps quantised weights for a step.
        autotuner: chooses the fastest candidate for a shape. None means the first candidate.
    """

    probs_commute = False
    # The quantisation of the rows gathers them.
    wgrad_reads_gathered_rows = False

    def __init__(
        self, block_size: int = 128, weight_cache: WeightCache | None = None, autotuner: Autotuner | None = None
    ) -> None:
        super().__init__(autotuner or Autotuner(is_enabled=False))
        self.block_size = block_size
        self._weight_cache = weight_cache or WeightCache()

    def fc1_tile_configs(self, x: Tensor) -> tuple[TileConfig, ...]:
        """Return none: the kernel of both projections does not quantise."""
        return ()

    def scatter_tile_configs(self, x: Tensor) -> tuple[TileConfig, ...]:
        """Return none: the kernel that writes rows to their places does not quantise."""
        return ()

    def quantized_weights(self, w_EKN: Tensor) -> QuantizedTensor:
        """Quantise matrices, or return the matrices cached in this step."""
        return self._weight_cache.get(w_EKN, partial(quantize_weights, block_size=self.block_size))

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class. The gate and up projections share the quantised rows."""
        x = rows.derived("quantized rows", self._quantize_rows)
        y_RN = rows.values.new_empty(rows.num_rows, w_EKN.shape[2])
        scaled_grouped_gemm(x, self.quantized_weights(w_EKN), offsets_E, y_RN)
        return y_RN if second is None else y_RN.add_(self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E))

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class. The gate and up projections share the quantised rows."""
        quantize = partial(self._quantize_columns, offsets_E=offsets_E)
        x, g = (operand.derived("quantized columns", quantize) for operand in (rows, grad))
        out = rows.values.new_empty(len(offsets_E), rows.values.shape[1], grad.values.shape[1])
        return scaled_grouped_gemm_weight_grad(x, g, offsets_E, out)

    def _quantize_rows(self, rows: GatheredRows) -> QuantizedTensor:
        return quantize_rows(unit_stride(rows.values), rows.num_rows, rows.source_R, self.block_size)

    def _quantize_columns(self, rows: GatheredRows, offsets_E: Tensor) -> QuantizedTensor:
        return quantize_columns(unit_stride(rows.values), rows.num_rows, rows.source_R, offsets_E, self.block_size)


class Fp8Linear:
    """FP8 linear backend: the grouped GEMMs of one expert with all rows."""

    def __init__(self, expert_ops: Fp8ExpertOps) -> None:
        self.expert_ops = expert_ops

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`."""
        return self.matmul(x_MK, w_NK.t())

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`."""
        return self.matmul(grad_MN, w_NK)

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`."""
        return self.expert_ops.weight_gradient(
            GatheredRows(grad_MN), GatheredRows(x_MK), single_expert_offsets(x_MK)
        ).squeeze(0)

    def matmul(self, x_MK: Tensor, w_KN: Tensor) -> Tensor:
        """Compute x @ w, [M, N]. `w_KN` is a view of a weight."""
        return self.expert_ops.grouped_gemm(GatheredRows(x_MK), w_KN.unsqueeze(0), single_expert_offsets(x_MK))


def single_expert_offsets(x: Tensor) -> Tensor:
    """Return the end offset of all rows, as rows of one expert, int32 [1]."""
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
