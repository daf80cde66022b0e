"""MXFP8 and NVFP4 GEMMs on tensor cores that support the formats, through torch.

**It has not been run on hardware.** It is written for `torch.nn.functional.scaled_mm` and tested with an emulation of
it. So it is used only after `scaled_mm_unsupported_reason` has compared a GEMM with the emulation on the device.

Blackwell's tensor cores read block scales in tiles of 128 rows and 4 columns. As cuBLAS documents it for blocks of 16
and 32 values ("1D block scaling factors layout"), tiles are contiguous, along the columns first. Within a tile the
scale at (row, column) is element (row % 32) * 16 + (row // 32) * 4 + column. torch calls it SWIZZLE_32_4_4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.message_text import first_line
from moefold.ops.quantization.emulated import EmulatedLinear
from moefold.ops.quantization.formats import E4M3_MAX, QuantFormat, scale_blocks

if TYPE_CHECKING:
    from moefold.ops.triton.fp8_gemm import Fp8Linear

DEPTH_MULTIPLE = 128
"""The reduction dim is padded to a multiple of this: 4 blocks of 32, or 8 of 16."""
UNEVEN_SIZES = (300, 200, 170)
"""Sizes of the self-test whose blocks and tiles of scales are incomplete."""
OUTPUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_RELATIVE_ERROR = 2.0**-7
"""Tolerance of a GEMM against the emulation, relative to its largest value: two roundings to bfloat16 differ by 2**-8,
sums in another order by less.
"""


@dataclass(frozen=True)
class ScaledOperand:
    """Quantised matrix in the form that `scaled_mm` expects."""

    values: Tensor
    """e4m3 [rows, depth], or two values of e2m1 in a byte, [rows, depth/2]."""
    scales: list[Tensor]
    scale_recipes: list[Any]
    swizzles: list[Any]


def torch_scaled_mm(*arguments: Any, **options: Any) -> Tensor:
    """Call `torch.nn.functional.scaled_mm`."""
    # Looked up when it is called: older torch versions lack it and use the emulation.
    return F.scaled_mm(*arguments, **options)


@dataclass(frozen=True)
class ScaledMMLinear(EmulatedLinear):
    """Linear backend with the GEMMs of the emulation on tensor cores. Only the order of sums differs."""

    scaled_mm: Callable[..., Tensor] = torch_scaled_mm
    """Function with the signature of `torch.nn.functional.scaled_mm`."""

    def quantized_matmul(self, a_MK: Tensor, b_NK: Tensor, b_block_rows: int) -> Tensor:
        """See base class."""
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
    """Quantise a matrix in blocks [block_rows, block_size], zero-padded to whole tiles of scales."""
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % DEPTH_MULTIPLE, 0, -x_MK.shape[0] % SCALE_TILE_ROWS))
    blocks, scale = scale_blocks(padded, quant_format, block_rows)
    values = quant_format.round_values(blocks).flatten(2, 3).flatten(0, 1)
    scales = scale.squeeze(3).squeeze(1).repeat_interleave(block_rows, 0)
    if quant_format.name == "mxfp8":
        layout = swizzle_scales(scales.to(torch.float8_e8m0fnu).view(torch.uint8)).view(torch.float8_e8m0fnu)
        return ScaledOperand(
            values.to(torch.float8_e4m3fn), [layout], [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]
        )
    # The scale of the tensor is a power of two (`two_level_scale`): block scales divided by it are e4m3 values.
    outer = torch.exp2(torch.ceil(torch.log2(scales.max() / E4M3_MAX)))
    layout = swizzle_scales((scales / outer).to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)
    return ScaledOperand(
        pack_e2m1(values),
        [layout, outer.float()],
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],
    )


def pack_e2m1(values_MK: Tensor) -> Tensor:
    """Pack e2m1 values two to a byte, the first in the low bits: float4_e2m1fn_x2 [M, K/2]."""
    magnitudes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values_MK.device)
    codes = torch.bucketize(values_MK.abs().float(), magnitudes).to(torch.uint8)
    codes |= torch.signbit(values_MK).to(torch.uint8) << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def scaled_mm_unsupported_reason(
    linear: "EmulatedLinear | Fp8Linear",
    quant_format: QuantFormat,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int] = UNEVEN_SIZES,
) -> str:
    """Compare the three GEMMs of a small layer with the emulation, and return the disagreement, empty if they agree.

    Block magnitudes differ widely, so that a misplaced scale is detected.

    Args:
        linear: the GEMMs.
        quant_format: format that they quantise to.
        dtype: the dtype of the run, as a device may support one result dtype and not another.
        sizes: rows M, depth K and width N. N is at most M and K.
    """
    num_rows, depth, width = sizes
    generator = torch.Generator().manual_seed(11)
    magnitudes = torch.logspace(-2, 2, depth).unsqueeze(0) * torch.logspace(-1, 1, num_rows).unsqueeze(1)
    x, w, grad = (torch.randn(num_rows, depth, generator=generator) * magnitudes for _ in range(3))
    x, w, grad = (value.to(device, dtype) for value in (x, w[:width], grad[:, :width].contiguous()))
    emulated = EmulatedLinear(quant_format)
    for name, arguments in (("forward", (x, w)), ("input_gradient", (grad, w)), ("weight_gradient", (grad, x))):
        try:
            actual = getattr(linear, name)(*arguments)
        # Any error means that the device does not support these GEMMs. It is reported in the run's message.
        except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
            return f"{name}: {type(error).__name__}: {first_line(error)}"
        expected = getattr(emulated, name)(*arguments).float()
        error_ratio = (actual.float() - expected).abs().max() / expected.abs().max()
        if not error_ratio <= MAX_RELATIVE_ERROR:
            return (
                f"{name} is {float(error_ratio):.1e} of its largest value away from the emulation, "
                f"more than {MAX_RELATIVE_ERROR:.1e}"
            )
    return ""


SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4
SCALE_TILE_LANES = 32
"""Rows of a row group of a tile, whose scales are interleaved with the scales of the other groups."""


def swizzle_scales(scales_MC: Tensor) -> Tensor:
    """Swizzle block scales into the layout of the tensor cores, [M * C].

    Args:
        scales_MC: scales of M rows with C blocks each, multiples of 128 and 4.
    """
    groups = SCALE_TILE_ROWS // SCALE_TILE_LANES
    tiles = scales_MC.unflatten(1, (-1, SCALE_TILE_COLUMNS)).unflatten(0, (-1, groups, SCALE_TILE_LANES))
    # [row tile, row group, lane, column tile, column] -> [row tile, column tile, lane, row group, column]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
