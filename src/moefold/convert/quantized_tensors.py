"""Quantised weights of Hugging Face folders, block-wise FP8 and MXFP4, read as the bfloat16 weights they stand for.

A quantised weight is several tensors of a folder. Each pair is replaced by one tensor that is dequantised while it is
read, some rows at a time, so that the code that maps, compares and writes tensors does not know the formats.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.convert.safetensors_file import QUANTIZED_DTYPES, OnRows, TensorLocation, bytes_of
from moefold.errors import ConfigError, format_list

FP8_SCALES = "_scale_inv"
"""Suffix of the scales of a block-wise FP8 weight (arXiv:2412.19437 sec. 3.3.2)."""
MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"
"""Suffixes of the parts of an MXFP4 weight (gpt-oss)."""
MXFP4_GROUP = 32
"""Values that share a scale (OCP Microscaling Formats 1.0 sec. 5.2)."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 8 codes; bit 3 is the sign."""
E8M0_BIAS = 127
DEQUANTIZED_DTYPE = "BF16"
_ROWS_BYTES = 1 << 24
"""Bytes of the rows that are dequantised at a time where a whole tensor is read."""


def dequantize_tensors(
    tensors: Mapping[str, TensorLocation], quantization: Mapping[str, Any], folder: Path
) -> dict[str, TensorLocation]:
    """Replace the parts of each quantised weight by one bfloat16 tensor.

    Args:
        tensors: of the folder, by name.
        quantization: its `quantization_config`, which `quantization_unsupported_reason` accepts.

    Raises:
        ConfigError: a part is missing, or has another shape or dtype than the others mean.
    """
    is_fp8 = quantization["quant_method"] == "fp8"
    found = _pair_fp8(tensors, quantization["weight_block_size"]) if is_fp8 else _pair_mxfp4(tensors)
    wrong = [
        f"tensor {name} of type {stored.dtype} lacks its other part"
        for name, stored in found.items()
        if stored.dtype in QUANTIZED_DTYPES
    ]
    wrong += [
        f"tensor {name} does not fit the shape {list(t.values.shape)} of its values"
        for name, t in found.items()
        if isinstance(t, DequantizedTensor) and not t.has_matching_parts()
    ]
    if wrong:
        raise ConfigError(f"{str(folder)!r}: {format_list(sorted(wrong))}")
    return found


def _pair_fp8(tensors: Mapping[str, TensorLocation], block: Sequence[int]) -> dict[str, TensorLocation]:
    found: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        original = tensors.get(name.removesuffix(FP8_SCALES)) if name.endswith(FP8_SCALES) else None
        if original is not None and original.dtype == "F8_E4M3":
            continue
        scales = tensors.get(name + FP8_SCALES)
        if stored.dtype == "F8_E4M3" and scales is not None:
            found[name] = BlockFp8Tensor(
                stored.file,
                DEQUANTIZED_DTYPE,
                stored.shape,
                stored.start,
                values=stored,
                scales=scales,
                block=(block[0], block[1]),
            )
        else:
            found[name] = stored
    return found


def _pair_mxfp4(tensors: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    found: dict[str, TensorLocation] = {}
    for name, stored in tensors.items():
        stem = re.sub(f"({MXFP4_BLOCKS}|{MXFP4_SCALES})$", "", name)
        blocks = tensors.get(stem + MXFP4_BLOCKS)
        scales = tensors.get(stem + MXFP4_SCALES)
        if stem == name or blocks is None or scales is None or len(blocks.shape) != 4:
            found[name] = stored
        elif name.endswith(MXFP4_BLOCKS):
            experts, rows, groups, _ = blocks.shape
            shape = (experts, groups * MXFP4_GROUP, rows)
            found[stem] = Mxfp4Tensor(blocks.file, DEQUANTIZED_DTYPE, shape, blocks.start, values=blocks, scales=scales)
    return found


@dataclass(frozen=True, kw_only=True)
class DequantizedTensor(TensorLocation, ABC):
    """A bfloat16 tensor that is computed from quantised values and their scales while it is read.

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
    """Matrix in e4m3 with one scale for each block of rows and columns; blocks at the end may be smaller."""

    block: tuple[int, int]

    def has_matching_parts(self) -> bool:
        """Return whether there is a scale for each block."""
        sizes = tuple(-(-size // width) for size, width in zip(self.values.shape, self.block, strict=False))
        is_float = self.scales.dtype in ("F32", "BF16")
        return len(self.values.shape) == 2 and self.scales.shape == sizes and is_float

    def parts(self, name: str) -> dict[str, TensorLocation]:
        """Return codes and scales."""
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
    """Experts in e2m1, [E, out, in/32, 16] with two values a byte, low bits first; read as [E, in, out]."""

    def has_matching_parts(self) -> bool:
        """Return whether there is a scale for each group of 32 values."""
        is_packed = self.values.shape[3] == MXFP4_GROUP // 2 and self.scales.shape == self.values.shape[:3]
        return is_packed and self.values.dtype == self.scales.dtype == "U8"

    def parts(self, name: str) -> dict[str, TensorLocation]:
        """Return codes and scales."""
        return {f"{name}{MXFP4_BLOCKS}": self.values, f"{name}{MXFP4_SCALES}": self.scales}

    def read(self, index: Sequence[slice], on_rows: OnRows | None = None) -> Tensor:
        """Read a part; one expert at a time is in memory as a whole."""
        experts = range(index[0].start, index[0].stop, index[0].step or 1)
        parts = [self._expert(expert)[index[1], index[2]] for expert in experts]
        return torch.stack(parts) if parts else torch.empty(0, *self.shape[1:], dtype=torch.bfloat16)

    def _expert(self, number: int) -> Tensor:
        """Dequantise one expert, [in, out]."""
        rows = slice(number, number + 1, 1)
        packed = self.values.read((rows, *(slice(0, size, 1) for size in self.values.shape[1:])))[0]
        exponents = self.scales.read((rows, *(slice(0, size, 1) for size in self.scales.shape[1:])))[0]
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
        values = torch.ldexp(table[codes], exponents.int().unsqueeze(-1) - E8M0_BIAS)
        return values.to(torch.bfloat16).flatten(-2).t()
