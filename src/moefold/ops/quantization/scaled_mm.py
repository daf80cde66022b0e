"""Products of MXFP8 and NVFP4 on matrix units that have the formats, through torch.

**It has not been run on hardware.** It is written against `torch.nn.functional.scaled_mm` and tested against a stand-in
for it, so nothing is computed with it before `scaled_mm_unsupported_reason` has compared a product with the simulation on the device.

How matrix units of Blackwell read the scales of blocks: in tiles of 128 rows and 4 columns.

As cuBLAS documents it for blocks of 16 and 32 values ("1D block scaling factors layout"): tiles lie one behind the
other, along the columns first; within one the scale at (row, column) is element (row % 32) * 16 + (row // 32) * 4 +
column. torch calls it SWIZZLE_32_4_4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.quantization.emulated import EmulatedLinear
from moefold.ops.quantization.formats import E4M3_MAX, QuantFormat, scale_blocks

DEPTH_MULTIPLE = 128
"""What a product sums over is filled up to a multiple of this: 4 blocks of 32, or 8 of 16."""
OUTPUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_RELATIVE_ERROR = 2.0**-7
"""Most that a product may differ from the simulation, relative to its largest value: two roundings to bfloat16 are
2**-8 apart, and sums in another order by less."""


@dataclass(frozen=True)
class ScaledOperand:
    """A rounded matrix as `scaled_mm` takes it."""

    values: Tensor
    """e4m3 [rows, depth], or two values of e2m1 in a byte, [rows, depth/2]."""
    scales: list[Tensor]
    scale_recipes: list[Any]
    swizzles: list[Any]


def _torch_scaled_mm(*arguments: Any, **options: Any) -> Tensor:
    # Looked up when it is called: a torch without it simulates.
    product: Tensor = F.scaled_mm(*arguments, **options)
    return product


@dataclass(frozen=True)
class ScaledMMLinear(EmulatedLinear):
    """The same products as the simulation, but for the order of sums."""

    scaled_mm: Callable[..., Tensor] = _torch_scaled_mm
    """`torch.nn.functional.scaled_mm`, or what stands for it."""

    def quantized_matmul(self, a_MK: Tensor, b_NK: Tensor, b_block_rows: int) -> Tensor:
        """A @ b.T, both rounded in blocks along K; those of b have so many rows."""
        (num_rows, depth) = a_MK.shape
        width = b_NK.shape[0]
        if num_rows == 0 or depth == 0 or width == 0:
            return a_MK.new_zeros(num_rows, width)
        a = quantize_operand(a_MK, self.quant_format)
        b = quantize_operand(b_NK, self.quant_format, b_block_rows)
        y = self.scaled_mm(
            a.values, b.values.t(), a.scales, a.scale_recipes, b.scales, b.scale_recipes, a.swizzles, b.swizzles,
            output_dtype=a_MK.dtype if a_MK.dtype in OUTPUT_DTYPES else torch.float32,
        )  # fmt: skip
        return y[:num_rows, :width].to(a_MK.dtype)


def quantize_operand(x_MK: Tensor, quant_format: QuantFormat, block_rows: int = 1) -> ScaledOperand:
    """Round a matrix in blocks [rows, recipe.block]; rows and columns of zeros fill it up to whole tiles of scales."""
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % DEPTH_MULTIPLE, 0, -x_MK.shape[0] % SCALE_TILE_ROWS))
    blocks, scale = scale_blocks(padded, quant_format, block_rows)
    values = quant_format.round_values(blocks).flatten(2, 3).flatten(0, 1)
    scales = scale.squeeze(3).squeeze(1).repeat_interleave(block_rows, 0)
    if quant_format.name == "mxfp8":
        layout = swizzle_scales(scales.to(torch.float8_e8m0fnu).view(torch.uint8)).view(torch.float8_e8m0fnu)
        return ScaledOperand(
            values.to(torch.float8_e4m3fn), [layout], [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]
        )
    # The scale of the tensor is a power of two (`two_level_scale`): those of the blocks over it are values of e4m3.
    outer = torch.exp2(torch.ceil(torch.log2(scales.max() / E4M3_MAX)))
    layout = swizzle_scales((scales / outer).to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)
    return ScaledOperand(
        pack_e2m1(values),
        [layout, outer.float()],
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],
    )


def pack_e2m1(values_MK: Tensor) -> Tensor:
    """Values of e2m1 as they are stored, the first of two in the lower bits: float4_e2m1fn_x2 [M, K/2]."""
    magnitudes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values_MK.device)
    codes = torch.bucketize(values_MK.abs().float(), magnitudes).to(torch.uint8)
    codes |= torch.signbit(values_MK).to(torch.uint8) << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def scaled_mm_unsupported_reason(linear: ScaledMMLinear, device: torch.device, dtype: torch.dtype) -> str:
    """Compute the three products of a small layer on the device and by simulation; empty if they agree, else why not.

    Blocks of very different size, uneven widths: a scale that is read for another block is seen. `dtype` is that of the
    run, as a device may know the products with results of one type and not of another.
    """
    generator = torch.Generator().manual_seed(11)
    spread = torch.logspace(-2, 2, 200).unsqueeze(0) * torch.logspace(-1, 1, 300).unsqueeze(1)
    x, w, grad = (torch.randn(300, 200, generator=generator) * part for part in (spread, spread, spread.abs()))
    x, w, grad = (value.to(device, dtype) for value in (x, w[:170], grad[:, :170].contiguous()))
    simulated = EmulatedLinear(linear.quant_format)
    for name, arguments in (("forward", (x, w)), ("input_gradient", (grad, w)), ("weight_gradient", (grad, x))):
        try:
            found = getattr(linear, name)(*arguments)
        # Whatever it is: it keeps this device from these products, and is told in the note of the run.
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
            return f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}"
        expected = getattr(simulated, name)(*arguments).float()
        apart = (found.float() - expected).abs().max() / expected.abs().max()
        if not apart <= MAX_RELATIVE_ERROR:
            return f"{name} is {float(apart):.1e} of its largest value away from the simulation, more than {MAX_RELATIVE_ERROR:.1e}"
    return ""


SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4
SCALE_TILE_LANES = 32
"""Rows of a tile that are neighbours in it only after as many bytes as a row group has."""


def swizzle_scales(scales_MC: Tensor) -> Tensor:
    """The scales of a matrix as they are to lie in memory, [M * C].

    Args:
        scales_MC: of M rows and C blocks in each, multiples of 128 and 4.
    """
    groups = SCALE_TILE_ROWS // SCALE_TILE_LANES
    tiles = scales_MC.unflatten(1, (-1, SCALE_TILE_COLUMNS)).unflatten(0, (-1, groups, SCALE_TILE_LANES))
    # [row tile, row group, lane, column tile, column] -> [row tile, column tile, lane, row group, column]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
