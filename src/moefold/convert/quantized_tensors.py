"""Quantised weights of Hugging Face folders, block-wise FP8 and MXFP4: read as bfloat16, and written.

A quantised weight is several tensors of a folder. Each pair is replaced by one tensor that is dequantised while it is
read, some rows at a time. So mapping, comparing and writing tensors do not depend on the formats.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.convert.families.family import Family
from moefold.convert.families.tensor_mapping import Shape, StateDictMapping
from moefold.convert.safetensors_file import QUANTIZED_DTYPES, OnRows, TensorLocation, bytes_of
from moefold.cost.layer_spec import model_weights
from moefold.cost.state_bytes import QUANTIZED_PARTS
from moefold.errors import ConfigError
from moefold.message_text import format_list

FP8_SCALES = "_scale_inv"
"""Suffix of the scales of a block-wise FP8 weight (arXiv:2412.19437 sec. 3.3.2)."""
MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
"""Suffixes of the parts of an MXFP4 weight (gpt-oss)."""
MXFP4_GROUP = 32
"""Values that share a scale (OCP Microscaling Formats 1.0 sec. 5.2)."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 8 codes. Bit 3 is the sign."""
E8M0_BIAS = 127
DEQUANTIZED_DTYPE = "BF16"
_ROWS_BYTES = 1 << 24
"""Bytes of the rows that are dequantised at a time when a whole tensor is read."""


def dequantize_tensors(
    tensors: Mapping[str, TensorLocation], quantization: Mapping[str, Any], folder: Path
) -> dict[str, TensorLocation]:
    """Replace the parts of each quantised weight by one bfloat16 tensor. Refuse missing or unfit parts."""
    is_fp8 = quantization["quant_method"] == "fp8"
    pairs = _pair_fp8(tensors, quantization["weight_block_size"]) if is_fp8 else _pair_mxfp4(tensors)
    undescribed = [
        f"tensor {name} of type {stored.dtype} lacks its other part"
        for name, stored in pairs.items()
        if stored.dtype in QUANTIZED_DTYPES
    ]
    undescribed += [
        f"tensor {name} does not fit the shape {list(t.values.shape)} of its values"
        for name, t in pairs.items()
        if isinstance(t, DequantizedTensor) and not t.has_matching_parts()
    ]
    if undescribed:
        raise ConfigError(f"{str(folder)!r}: {format_list(sorted(undescribed))}")
    return pairs


def _pair_fp8(tensors: Mapping[str, TensorLocation], block: Sequence[int]) -> dict[str, TensorLocation]:
    pairs: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        original = tensors.get(name.removesuffix(FP8_SCALES)) if name.endswith(FP8_SCALES) else None
        if original is not None and original.dtype == "F8_E4M3":
            continue
        scales = tensors.get(name + FP8_SCALES)
        if stored.dtype != "F8_E4M3" or scales is None:
            pairs[name] = stored
            continue
        where = (stored.file, DEQUANTIZED_DTYPE, stored.shape, stored.start)
        pairs[name] = BlockFp8Tensor(*where, values=stored, scales=scales, block=(block[0], block[1]))
    return pairs


def _pair_mxfp4(tensors: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    pairs: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        stem = re.sub(f"({MXFP4_BLOCKS}|{MXFP4_SCALES})$", "", name)
        blocks = tensors.get(stem + MXFP4_BLOCKS)
        scales = tensors.get(stem + MXFP4_SCALES)
        if stem == name or blocks is None or scales is None or len(blocks.shape) != 4:
            pairs[name] = stored
        elif name.endswith(MXFP4_BLOCKS):
            experts, rows, groups, _ = blocks.shape
            shape = (experts, groups * MXFP4_GROUP, rows)
            pairs[stem] = Mxfp4Tensor(blocks.file, DEQUANTIZED_DTYPE, shape, blocks.start, values=blocks, scales=scales)
    return pairs


@dataclass(frozen=True, kw_only=True)
class DequantizedTensor(TensorLocation, ABC):
    """bfloat16 tensor that is computed from quantised values and their scales while it is read.

    `file` and `start` locate the values.
    """

    values: TensorLocation
    scales: TensorLocation

    @abstractmethod
    def has_matching_parts(self) -> bool:
        """Return whether dtype and shape of the parts fit each other."""

    @abstractmethod
    def parts(self, name: str) -> dict[str, TensorLocation]:
        """Return the stored tensors of the weight of this name, by their own names."""

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the dequantised values, some rows at a time."""
        row_bytes = max(1, self.num_bytes // max(1, self.shape[0]))
        step = max(1, _ROWS_BYTES // row_bytes)
        for start in range(0, self.shape[0], step):
            values = self.read_rows(start, min(start + step, self.shape[0]))
            yield bytes(bytes_of(values.contiguous()))


@dataclass(frozen=True, kw_only=True)
class BlockFp8Tensor(DequantizedTensor):
    """Matrix in e4m3 with a scale for each block of rows and columns. Blocks at the end may be smaller."""

    block: tuple[int, int]

    def has_matching_parts(self) -> bool:
        """Return whether there is a scale for each block."""
        sizes = tuple(-(-size // width) for size, width in zip(self.values.shape, self.block, strict=False))
        is_float = self.scales.dtype in ("F32", "BF16")
        return len(self.values.shape) == 2 and self.scales.shape == sizes and is_float

    def parts(self, name: str) -> dict[str, TensorLocation]:
        """Return the stored tensors of the weight: its codes under `name`, and their scales."""
        return {name: self.values, f"{name}{FP8_SCALES}": self.scales}

    def read(self, index: Sequence[slice], on_rows: OnRows | None = None) -> Tensor:
        """Read a part, rounded to bfloat16 once."""
        rows = index[0]
        height, width = self.block
        columns = self.shape[1]
        every_column = slice(0, columns, 1)
        first = rows.start // height
        last = -(-rows.stop // height)
        values = self.values.read((slice(rows.start, rows.stop, 1), every_column)).float()
        scales = self.scales.read((slice(first, last, 1), slice(0, self.scales.shape[1], 1))).float()
        scales = scales.repeat_interleave(height, 0)[rows.start - first * height :][: len(values)]
        values *= scales.repeat_interleave(width, 1)[:, :columns]
        return values[:: rows.step, index[1]].to(torch.bfloat16).contiguous()


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(DequantizedTensor):
    """Experts in e2m1, [E, out, in/32, 16] with two values per byte, low bits first. They are read as [E, in, out]."""

    def has_matching_parts(self) -> bool:
        """Return whether there is a scale for each group of 32 values."""
        is_packed = self.values.shape[3] == MXFP4_GROUP // 2 and self.scales.shape == self.values.shape[:3]
        return is_packed and self.values.dtype == self.scales.dtype == "U8"

    def parts(self, name: str) -> dict[str, TensorLocation]:
        """Return the stored tensors of the experts: the packed codes, and their scales."""
        return {f"{name}{MXFP4_BLOCKS}": self.values, f"{name}{MXFP4_SCALES}": self.scales}

    def read(self, index: Sequence[slice], on_rows: OnRows | None = None) -> Tensor:
        """Read a part. Only one whole expert at a time is in memory."""
        experts = range(index[0].start, index[0].stop, index[0].step or 1)
        blocks = [self._expert(expert)[index[1], index[2]] for expert in experts]
        return torch.stack(blocks) if blocks else torch.empty(0, *self.shape[1:], dtype=torch.bfloat16)

    def _expert(self, number: int) -> Tensor:
        """Dequantise one expert, [in, out]."""
        rows = slice(number, number + 1, 1)
        packed = self.values.read((rows, *(slice(0, size, 1) for size in self.values.shape[1:])))[0]
        exponents = self.scales.read((rows, *(slice(0, size, 1) for size in self.scales.shape[1:])))[0]
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
        values = torch.ldexp(table[codes], exponents.int().unsqueeze(-1) - E8M0_BIAS)
        return values.to(torch.bfloat16).flatten(-2).t()


QuantizationKind = Literal["none", "fp8", "mxfp4"]
FP8_BLOCK = 128
"""Rows and columns of a block with one scale (arXiv:2412.19437 sec. 3.3.2)."""
_EXPORTED_PARTS = frozenset(QUANTIZED_PARTS) - {"mtp"}
"""Parts whose matrices are quantised. The projection of an MTP layer is not: readers such as vLLM expect it whole."""
_MAX_EXPONENT = 2
"""Exponent of the largest e2m1 magnitude."""


@dataclass(frozen=True)
class Quantization:
    """Format of an export's quantisation, and the tensors that are quantised."""

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
        """Yield ranges of rows that can be quantised separately: whole blocks of rows, or experts."""
        unit = FP8_BLOCK if self.kind == "fp8" else 1
        row_values = max(1, torch.Size(shape[1:]).numel())
        step = max(1, max_bytes // (4 * row_values * unit)) * unit
        for start in range(0, shape[0], step):
            yield range(start, min(shape[0], start + step))

    def quantize(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Quantise some rows of a tensor, float32, and return the rows of each tensor that is written for it."""
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
        ConfigError: the format is incompatible with the family or its sizes.
    """
    if kind == "none":
        return Quantization(kind, frozenset())
    if (kind == "mxfp4") != (family.name == "gpt_oss"):
        other = "fp8" if kind == "mxfp4" else "mxfp4"
        raise ConfigError(f"--quantize {kind} is incompatible with family {family.name}; choose {other} or none")
    weights = model_weights(model)
    names = set()
    for name, pieces in mapping.by_hf_name.items():
        weight = weights.get(pieces[0].name)
        if weight is None or not weight.updates_as_matrix or weight.part not in _EXPORTED_PARTS:
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
    """Quantise a matrix in blocks: codes in e4m3, [rows, columns], and float32 scales, maximum magnitude / 448."""
    rows, columns = values.shape
    height = -(-rows // FP8_BLOCK)
    width = -(-columns // FP8_BLOCK)
    padded = torch.zeros(height * FP8_BLOCK, width * FP8_BLOCK)
    padded[:rows, :columns] = values
    largest = padded.view(height, FP8_BLOCK, width, FP8_BLOCK).abs().amax((1, 3))
    maximum = torch.finfo(torch.float8_e4m3fn).max
    scales = torch.where(largest > 0, largest / maximum, 1.0)
    expanded = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:rows, :columns]
    return (values / expanded).clamp(-maximum, maximum).to(torch.float8_e4m3fn), scales


def quantize_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise experts [E, in, out]: two e2m1 codes per byte, [E, out, in/32, 16], and E8M0 scales, [E, out, in/32].

    The scale of a group is the power of two below its largest magnitude, divided by 4 (OCP Microscaling Formats 1.0
    sec. 6.3). Ties go to the even code.
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
    # A tie with an odd code below it is rounded up, with an even code down.
    above = torch.bucketize(magnitudes, middles, right=True)
    below = torch.bucketize(magnitudes, middles, right=False)
    return torch.where(above % 2 == 0, above, below).int()


def expand_files(
    files: Mapping[str, Mapping[str, tuple[str, Shape]]], quantization: Quantization
) -> dict[str, dict[str, tuple[str, Shape]]]:
    """Return the tensors of each file, with quantised tensors replaced by their parts."""
    return {
        file: {
            tensor_name: spec
            for name, (dtype, shape) in tensors.items()
            for tensor_name, spec in quantization.part_specs(name, dtype, shape).items()
        }
        for file, tensors in files.items()
    }
