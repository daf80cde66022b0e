"""Quantisation formats with one scale for each block of neighbouring values, and packed FP8 rows for communication.

Packed rows are e4m3 values and their scales as bytes: half of bfloat16 (arXiv:2412.19437 sec. 3.3.3). They have the
blocks and scales of `train.precision = "fp8-blockwise"` for activations, so its GEMMs, which quantise their operands,
read rows that are rounded already. A row is quantised independently of rank and other rows. Packed rows are bytes
because gloo does not support the FP8 dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MIN_AMAX = 1e-30
"""Lower bound of a block's amax, so that the scale of a block of zeros is not 0."""


@dataclass(frozen=True)
class QuantFormat:
    """Number format, and the blocks that share a scale.

    Every operand has its blocks along the dim that the GEMM sums over, so a scale multiplies a whole partial sum. A
    block has values of only one token, except where the sum is over tokens.
    """

    name: str
    max_value: float
    """Largest value of the format."""
    round_values: Callable[[Tensor], Tensor]
    """Rounds scaled values to the format, to nearest, ties to even, and keeps their dtype."""
    block_size: int
    """Values of an activation or a gradient that share a scale."""
    weight_block_rows: int
    """Rows of a weight that share a scale. Its blocks are as long as the blocks of activations."""
    round_scale: Callable[[Tensor, Tensor], Tensor]
    """(amax / max_value of each block, its maximum over the tensor) -> the stored scales."""


def fake_quantize(x_MK: Tensor, quant_format: QuantFormat, block_rows: int = 1) -> Tensor:
    """Quantise in blocks [block_rows, block_size] and dequantise: the values that the hardware would multiply.

    Blocks begin at the first row and column. The last blocks may be incomplete.

    Returns:
        [M, K] in float32, or float64 for float64.
    """
    blocks, scale = scale_blocks(x_MK, quant_format, block_rows)
    values = quant_format.round_values(blocks) * scale
    return values.flatten(2, 3).flatten(0, 1)[: x_MK.shape[0], : x_MK.shape[1]]


def scale_blocks(x_MK: Tensor, quant_format: QuantFormat, block_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Divide x by the scales of its blocks [block_rows, block_size], ready to be rounded to the format.

    Returns:
        (values [M/rows, rows, K/block, block], zero-padded, and scales [M/rows, 1, K/block, 1]), in float32, or float64
        for float64.
    """
    x_fp32 = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32))
    padding = (0, -x_fp32.shape[1] % quant_format.block_size, 0, -x_fp32.shape[0] % block_rows)
    blocks = torch.nn.functional.pad(x_fp32, padding) if any(padding) else x_fp32
    blocks = blocks.unflatten(1, (-1, quant_format.block_size)).unflatten(0, (-1, block_rows))
    if blocks.numel() == 0:
        return blocks, blocks[..., :1]
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=MIN_AMAX) / quant_format.max_value
    scale = quant_format.round_scale(amax, amax.max())
    return (blocks / scale).clamp(-quant_format.max_value, quant_format.max_value), scale


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3: 4 exponent and 3 mantissa bits."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round to e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and a sign."""
    # Neighbouring values differ by 0.5 below 2, 1 from 2 to 4, and 2 above.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round() * step


def float32_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Return float32 scales: the amax of a block becomes the largest value of the format."""
    return amax.to(torch.float32).to(amax.dtype)


def power_of_two_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Round scales up to a power of two, e8m0: nothing saturates (arXiv:2506.08027 sec. 3.1)."""
    return torch.exp2(torch.ceil(torch.log2(amax)))


def two_level_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Round scales to e4m3 multiples of one scale for the whole tensor, here a power of two.

    With another outer scale the block scales would be rounded differently. The shards of a tensor, which have their own
    outer scales, would then be quantised differently from the whole tensor. A power of two only determines the blocks
    that are too small for an e4m3 scale: blocks below 2**-15 of the largest.
    """
    outer = torch.exp2(torch.ceil(torch.log2(tensor_amax / E4M3_MAX)))
    # Where the scale was rounded down, the largest value of the block saturates, by at most 1/16.
    return round_to_e4m3(amax / outer).clamp(min=2.0**-9) * outer


QUANT_FORMATS = {
    recipe.name: recipe
    for recipe in (
        # DeepSeek-V3: e4m3 for all operands, 1 x 128 and 128 x 128 blocks (arXiv:2412.19437 sec. 3.3.2).
        QuantFormat("fp8-blockwise", E4M3_MAX, round_to_e4m3, 128, 128, float32_scale),
        # OCP microscaling formats, with 32 values to a scale (arXiv:2310.10537).
        QuantFormat("mxfp8", E4M3_MAX, round_to_e4m3, 32, 1, power_of_two_scale),
        # 16 values to a scale, weights in squares (arXiv:2509.25149 sec. 4.3).
        QuantFormat("nvfp4", E2M1_MAX, round_to_e2m1, 16, 16, two_level_scale),
    )
}


WIRE_QUANT_FORMAT = QUANT_FORMATS["fp8-blockwise"]
CPU_CHUNK_VALUES = 2**17
"""Values of a chunk on a CPU (docs/log.md#2026-11-22-rows-in-8-bits-on-their-way-to-experts)."""
VALUE_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float32


def pack(x_RH: Tensor) -> Tensor:
    """Quantise rows to e4m3 in blocks [1, 128]: values of a row, then its scales, uint8 [R, H + 4 * ceil(H/128)]."""
    values, scales = quantize(x_RH)
    return torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), 1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Dequantise packed rows.

    Args:
        packed: result of `pack`, or rows of zero bytes, which become zeros.
        width: H.

    Returns:
        [R, H].
    """
    # Cloned for alignment: the scales need not begin at a multiple of their size.
    scales = packed[:, width:].clone(memory_format=torch.contiguous_format).view(SCALE_DTYPE)
    return dequantize(packed[:, :width].view(VALUE_DTYPE), scales, dtype)


def quantize(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows: (values e4m3 [R, H], scales float32 [R, ceil(H/128)])."""
    values = torch.empty(x_RH.shape, dtype=VALUE_DTYPE, device=x_RH.device)
    scales = torch.empty(
        len(x_RH), -(-x_RH.shape[1] // WIRE_QUANT_FORMAT.block_size), dtype=SCALE_DTYPE, device=x_RH.device
    )
    size = _rows_per_chunk(x_RH)
    for values_out, scales_out, x in zip(values.split(size), scales.split(size), x_RH.split(size), strict=True):
        blocks, scale = scale_blocks(x, WIRE_QUANT_FORMAT)
        values_out.copy_(blocks.flatten(1)[:, : x.shape[1]])
        scales_out.copy_(scale.flatten(1))
    return values, scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise values and scales of `quantize`, [R, H]."""
    if values.device.type != "cpu":
        return _apply_scales_(values.to(dtype), scales)
    rows = torch.empty(values.shape, dtype=dtype)
    size = _rows_per_chunk(values)
    compute_dtype = torch.promote_types(dtype, SCALE_DTYPE)
    for out, value, scale in zip(rows.split(size), values.split(size), scales.split(size), strict=True):
        out.copy_(_apply_scales_(_e4m3_to_float32(value).to(compute_dtype), scale))
    return rows


def _rows_per_chunk(x_RH: Tensor) -> int:
    """Return the rows of a chunk: on a CPU as many as its caches hold, on other devices all."""
    return max(1, CPU_CHUNK_VALUES // max(1, x_RH.shape[1]) if x_RH.device.type == "cpu" else len(x_RH))


def _apply_scales_(rows: Tensor, scales: Tensor) -> Tensor:
    """Multiply by the scales in place, with one rounding: bfloat16 represents all e4m3 values, but not the scales."""
    block = WIRE_QUANT_FORMAT.block_size
    num_full = rows.shape[1] // block * block
    rows[:, :num_full].unflatten(1, (-1, block)).mul_(scales[:, : num_full // block].unsqueeze(2))
    rows[:, num_full:].mul_(scales[:, num_full // block :])
    return rows


def _e4m3_to_float32(values: Tensor) -> Tensor:
    """Convert e4m3 to float32, in a fifth of the time of torch's conversion on a CPU.

    Sign, exponent and mantissa have the same order in float16 as in e4m3, with more exponent and mantissa bits: the
    shifted bits are the value times a power of two. NaN becomes a number here, but the scale of its block is NaN.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(torch.float32).mul_(2.0**8)


def straight_through_quantize(x_RH: Tensor) -> Tensor:
    """Quantise and dequantise like `pack` and `unpack`, with a straight-through gradient."""
    return _StraightThroughQuantize.apply(x_RH)


class _StraightThroughQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor) -> Tensor:
        return fake_quantize(x_RH, WIRE_QUANT_FORMAT).to(x_RH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> Tensor:
        return grad_RH
