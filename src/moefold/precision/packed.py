"""Rows of e4m3 as bytes, for the way between ranks: half of bfloat16 (arXiv:2412.19437 sec. 3.3.3).

The blocks and scales are those of `train.precision = "fp8-blockwise"` for activations, so that its products, which
round what they read, find the rows rounded already. A row is rounded by itself: it makes no difference on which rank,
nor among which other rows. Bytes, because gloo does not know the type.
"""

from typing import Any

import torch
from torch import Tensor

from moefold.precision.recipe import QUANT_FORMATS, fake_quantize, scale_blocks

WIRE_QUANT_FORMAT = QUANT_FORMATS["fp8-blockwise"]
CPU_CHUNK_VALUES = 2**17
"""Values that a CPU works on at a time (docs/log.md)."""
VALUE_DTYPE, SCALE_DTYPE = torch.float8_e4m3fn, torch.float32


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
    rows, size = torch.empty(values.shape, dtype=dtype), _rows_per_chunk(values)
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
