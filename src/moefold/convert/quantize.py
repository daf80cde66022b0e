"""Quantisation of exported weights: block-wise FP8 and MXFP4, the formats that `quantized_tensors.py` reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.convert.family import Family
from moefold.convert.quantized_tensors import (
    E2M1_VALUES,
    E8M0_BIAS,
    FP8_SCALES,
    MXFP4_BLOCKS,
    MXFP4_GROUP,
    MXFP4_SCALES,
)
from moefold.convert.tensor_mapping import StateDictMapping
from moefold.cost.layer_spec import model_weights
from moefold.errors import ConfigError

QuantizationKind = Literal["none", "fp8", "mxfp4"]
FP8_BLOCK = 128
"""Rows and columns of a block with one scale (arXiv:2412.19437 sec. 3.3.2)."""
_QUANTIZED_PARTS = ("attention", "dense_mlp", "experts", "shared_experts")
_MAX_EXPONENT = 2
"""Exponent of the largest e2m1 magnitude."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Quantization:
    """Quantisation of some tensors of an export.

    Attributes:
        kind: the format.
        names: the tensors that are quantised.
    """

    kind: QuantizationKind
    names: frozenset[str]

    def config_keys(self) -> dict[str, Any]:
        """Return the keys of config.json that name the format."""
        if self.kind == "none":
            return {}
        if self.kind == "mxfp4":
            return {"quantization_config": {"quant_method": "mxfp4"}}
        sizes = {"activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
        return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", **sizes}}

    def part_specs(self, name: str, dtype: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """Return dtype and shape of each tensor that is written for a tensor."""
        if name not in self.names:
            return {name: (dtype, shape)}
        if self.kind == "fp8":
            rows, columns = shape
            scales = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return {name: ("F8_E4M3", shape), f"{name}{FP8_SCALES}": ("F32", scales)}
        experts, inputs, outputs = shape
        groups = (experts, outputs, inputs // MXFP4_GROUP)
        return {
            f"{name}{MXFP4_BLOCKS}": ("U8", (*groups, MXFP4_GROUP // 2)),
            f"{name}{MXFP4_SCALES}": ("U8", groups),
        }

    def row_chunks(self, shape: Shape, max_bytes: int) -> Iterator[range]:
        """Yield ranges of rows that can be quantised alone: whole blocks of rows, or experts."""
        unit = FP8_BLOCK if self.kind == "fp8" else 1
        row_values = max(1, torch.Size(shape[1:]).numel())
        step = max(1, max_bytes // (4 * row_values * unit)) * unit
        for start in range(0, shape[0], step):
            yield range(start, min(shape[0], start + step))

    def quantize(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Quantise some rows of a tensor, float32; returns the rows of each tensor that is written for it."""
        if self.kind == "fp8":
            codes, scales = quantize_fp8(values)
            return {name: codes, f"{name}{FP8_SCALES}": scales}
        blocks, exponents = quantize_mxfp4(values)
        return {f"{name}{MXFP4_BLOCKS}": blocks, f"{name}{MXFP4_SCALES}": exponents}


def plan_quantization(
    kind: QuantizationKind, mapping: StateDictMapping, model: ModelConfig, family: Family
) -> Quantization:
    """Choose the tensors to quantise: matrices of attention and of feed-forward networks, or the experts of gpt-oss.

    Embedding, head, routers, norms and biases are never quantised.

    Raises:
        ConfigError: the format does not go with the family or its sizes.
    """
    if kind == "none":
        return Quantization(kind, frozenset())
    if (kind == "mxfp4") != (family.name == "gpt_oss"):
        other = "fp8" if kind == "mxfp4" else "mxfp4"
        raise ConfigError(f"--quantize {kind} does not go with family {family.name}; choose {other}, or leave it out")
    weights = model_weights(model)
    names = set()
    for name, pieces in mapping.by_hf_name.items():
        weight = weights.get(pieces[0].name)
        if weight is None or not weight.updates_as_matrix or weight.part not in _QUANTIZED_PARTS:
            continue
        shape = mapping.hf_shapes[name]
        if kind == "fp8" and len(shape) == 3:
            raise ConfigError(
                f"--quantize fp8 needs a tensor for each expert, and family {family.name} stores {name} of shape "
                f"{list(shape)}; leave it out"
            )
        if kind == "mxfp4" and (weight.part != "experts" or len(shape) != 3):
            continue
        if kind == "mxfp4" and shape[1] % MXFP4_GROUP:
            raise ConfigError(
                f"--quantize mxfp4 has one scale for {MXFP4_GROUP} inputs, and the experts have {shape[1]} in {name}; "
                "leave it out"
            )
        names.add(name)
    return Quantization(kind, frozenset(names))


def quantize_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks: codes in e4m3, [rows, columns], and float32 scales, largest magnitude / 448."""
    rows, columns = values.shape
    height = -(-rows // FP8_BLOCK)
    width = -(-columns // FP8_BLOCK)
    padded = torch.zeros(height * FP8_BLOCK, width * FP8_BLOCK)
    padded[:rows, :columns] = values
    largest = padded.view(height, FP8_BLOCK, width, FP8_BLOCK).abs().amax((1, 3))
    maximum = torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(largest > 0, largest / maximum, 1.0)
    each = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :columns]
    return (values / each).clamp(-maximum, maximum).to(torch.float8_e4m3fn), scales


def quantize_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise experts [E, in, out]: two e2m1 codes a byte, [E, out, in/32, 16], and E8M0 scales, [E, out, in/32].

    The scale of a group is the power of two below its largest magnitude, over 4 (OCP Microscaling Formats 1.0 sec.
    6.3). Ties go to the even code.
    """
    transposed = values.transpose(1, 2)
    grouped = transposed.reshape(*transposed.shape[:2], -1, MXFP4_GROUP)
    largest = grouped.abs().amax(-1)
    # frexp returns a mantissa in [0.5, 1).
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - _MAX_EXPONENT, -E8M0_BIAS)
    exponents = exponents.clamp(-E8M0_BIAS, E8M0_BIAS).int()
    scaled = torch.ldexp(grouped, -exponents.unsqueeze(-1)).contiguous()
    codes = _nearest_codes(scaled.abs()) + 8 * scaled.signbit()
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8).contiguous(), (exponents + E8M0_BIAS).to(torch.uint8)


def _nearest_codes(magnitudes: Tensor) -> Tensor:
    """Return the codes 0 to 7 of the nearest e2m1 magnitudes."""
    table = torch.tensor(E2M1_VALUES)
    middles = (table[1:] + table[:-1]) / 2
    # A tie with an odd code below goes up, with an even one it stays.
    above = torch.bucketize(magnitudes, middles, right=True)
    below = torch.bucketize(magnitudes, middles, right=False)
    return torch.where(above % 2 == 0, above, below).int()


def expand_files(
    files: Mapping[str, Mapping[str, tuple[str, Shape]]], quantization: Quantization
) -> dict[str, dict[str, tuple[str, Shape]]]:
    """Return the tensors of each file with the parts of quantised ones in their place."""
    return {
        file: {
            part: spec
            for name, (dtype, shape) in tensors.items()
            for part, spec in quantization.part_specs(name, dtype, shape).items()
        }
        for file, tensors in files.items()
    }
