"""How the operands of a matrix product are rounded to few bits: one scale for each block of neighbouring values.

Rows of e4m3 as bytes, for the way between ranks: half of bfloat16 (arXiv:2412.19437 sec. 3.3.3).

The blocks and scales are those of `train.precision = "fp8-blockwise"` for activations, so that its products, which
round what they read, find the rows rounded already. A row is rounded by itself: it makes no difference on which rank,
nor among which other rows. Bytes, because gloo does not know the type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MIN_AMAX = 1e-30
"""Scale of a block of zeros: any will do, and none may be 0."""


@dataclass(frozen=True)
class QuantFormat:
    """A number format and the blocks that share a scale.

    Every operand has its blocks along the dim that the product sums over: a scale multiplies a whole partial sum, and a
    token's blocks never hold another token's values, except where the sum goes over tokens.
    """

    name: str
    max_value: float
    """Of the format."""
    round_values: Callable[[Tensor], Tensor]
    """Rounds scaled values to the format, to the nearest and ties to even; gives them in the type they came in."""
    block_size: int
    """Values of an activation or a gradient that share a scale."""
    weight_block_rows: int
    """Rows of a weight that share a scale; its blocks are as long as those of activations."""
    round_scale: Callable[[Tensor, Tensor], Tensor]
    """(largest / format's largest of each block, the same of all) -> the scales as they are stored."""


def fake_quantize(x_MK: Tensor, quant_format: QuantFormat, block_rows: int = 1) -> Tensor:
    """The values that the hardware would multiply: quantised in blocks [rows, recipe.block] and scaled back.

    Blocks begin at the first row and column; the last ones may be cut off.

    Args:
        x_MK: [M, K].
        quant_format: format and block length.
        block_rows: rows of a block.

    Returns:
        [M, K] in float32, or float64 if that came.
    """
    blocks, scale = scale_blocks(x_MK, quant_format, block_rows)
    values = quant_format.round_values(blocks) * scale
    return values.flatten(2, 3).flatten(0, 1)[: x_MK.shape[0], : x_MK.shape[1]]


def scale_blocks(x_MK: Tensor, quant_format: QuantFormat, block_rows: int = 1) -> tuple[Tensor, Tensor]:
    """What is left to be rounded to the format, and the scales to multiply it with afterwards.

    Args:
        x_MK: [M, K].
        quant_format: format and block length.
        block_rows: rows of a block.

    Returns:
        (values [M/rows, rows, K/block, block], filled up with zeros; scales [M/rows, 1, K/block, 1]), in float32, or
        float64 if that came.
    """
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32))
    padding = (0, -wide.shape[1] % quant_format.block_size, 0, -wide.shape[0] % block_rows)
    blocks = torch.nn.functional.pad(wide, padding) if any(padding) else wide
    blocks = blocks.unflatten(1, (-1, quant_format.block_size)).unflatten(0, (-1, block_rows))
    if blocks.numel() == 0:
        return blocks, blocks[..., :1]
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=MIN_AMAX) / quant_format.max_value
    scale = quant_format.round_scale(amax, amax.max())
    return (blocks / scale).clamp(-quant_format.max_value, quant_format.max_value), scale


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round to 4 bits of exponent and 3 of mantissa."""
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4 or 6 and a sign."""
    # The distance of neighbours is 0.5 below 2, 1 from 2 to 4, and 2 beyond.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).to(x.dtype)
    return (x / step).round() * step


def float32_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Any scale: the largest value of a block is the largest of the format."""
    return amax.to(torch.float32).to(amax.dtype)


def power_of_two_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """The next power of two, e8m0: nothing is cut off (arXiv:2506.08027 sec. 3.1)."""
    return torch.exp2(torch.ceil(torch.log2(amax)))


def two_level_scale(amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """Scales in e4m3 under one for the whole tensor, a power of two here.

    With another outer scale the scales of the blocks would be rounded elsewhere, so that a tensor cut over ranks, whose
    parts have outer scales of their own, would be quantised in another way. A power of two changes nothing but which
    blocks are too small for a scale of e4m3: those below 2**-15 of the largest.
    """
    outer = torch.exp2(torch.ceil(torch.log2(tensor_amax / E4M3_MAX)))
    # Where the scale was rounded down the largest value of the block is cut off, by at most 1/16.
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
"""Values that a CPU works on at a time (docs/log.md)."""
VALUE_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float32


def pack(x_RH: Tensor) -> Tensor:
    """Round rows to e4m3 in blocks [1, 128]: the values of a row, then its scales, uint8 [R, H + 4 * ceil(H/128)]."""
    values, scales = quantize(x_RH)
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
    scales = packed[:, width:].clone(memory_format=torch.contiguous_format).view(SCALE_DTYPE)
    return dequantize(packed[:, :width].view(VALUE_DTYPE), scales, dtype)


def quantize(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of packed rows: (values e4m3 [R, H], scales float32 [R, ceil(H/128)])."""
    values = torch.empty(x_RH.shape, dtype=VALUE_DTYPE, device=x_RH.device)
    scales = torch.empty(
        len(x_RH), -(-x_RH.shape[1] // WIRE_QUANT_FORMAT.block_size), dtype=SCALE_DTYPE, device=x_RH.device
    )
    size = _rows_per_chunk(x_RH)
    for to, to_scales, x in zip(values.split(size), scales.split(size), x_RH.split(size), strict=True):
        blocks, scale = scale_blocks(x, WIRE_QUANT_FORMAT)
        to.copy_(blocks.flatten(1)[:, : x.shape[1]])
        to_scales.copy_(scale.flatten(1))
    return values, scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of the two parts that `quantize` made, [R, H]."""
    if values.device.type != "cpu":
        return _apply_scales_(values.to(dtype), scales)
    rows = torch.empty(values.shape, dtype=dtype)
    size = _rows_per_chunk(values)
    wide = torch.promote_types(dtype, SCALE_DTYPE)
    for to, value, scale in zip(rows.split(size), values.split(size), scales.split(size), strict=True):
        to.copy_(_apply_scales_(_e4m3_to_float32(value).to(wide), scale))
    return rows


def _rows_per_chunk(x_RH: Tensor) -> int:
    """Rows to work on at a time: on a CPU as many as its caches hold what lies between, elsewhere all."""
    return max(1, CPU_CHUNK_VALUES // max(1, x_RH.shape[1]) if x_RH.device.type == "cpu" else len(x_RH))


def _apply_scales_(rows: Tensor, scales: Tensor) -> Tensor:
    """Multiply in place, in float32 at least, so that one rounding follows: bfloat16 has all of e4m3, but no scale."""
    block = WIRE_QUANT_FORMAT.block_size
    whole = rows.shape[1] // block * block
    rows[:, :whole].unflatten(1, (-1, block)).mul_(scales[:, : whole // block].unsqueeze(2))
    rows[:, whole:].mul_(scales[:, whole // block :])
    return rows


def _e4m3_to_float32(values: Tensor) -> Tensor:
    """Values of e4m3 in float32, in a fifth of the time of torch's conversion on a CPU.

    Sign, exponent and mantissa stand in float16 as in e4m3, the last two in more bits: what is read is too small by a
    power of two. What is no number becomes one here; the scale of its block is none either.
    """
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(torch.float32).mul_(2.0**8)


def straight_through_quantize(x_RH: Tensor) -> Tensor:
    """What `unpack` would make of `pack`; the gradient passes as if nothing were rounded."""
    return _StraightThroughQuantize.apply(x_RH)


class _StraightThroughQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor) -> Tensor:
        return fake_quantize(x_RH, WIRE_QUANT_FORMAT).to(x_RH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> Tensor:
        return grad_RH
