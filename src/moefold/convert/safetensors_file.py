"""Safetensors format: a length, a JSON header, then the bytes of the tensors. Read and written in parts.

The safetensors library needs all tensors of a file in memory to write it, and maps whole files, whose pages count as
resident memory. This module only maps the rows of one read, so that a model that exceeds the memory can be converted.
Nothing is unpickled. Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moefold.bounded_read import open_regular, parse_json
from moefold.convert.families.mtp import MAX_HEADER_BYTES
from moefold.errors import ConfigError
from moefold.remote_path import RemotePath

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights by name."""
QUANTIZED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
"""Dtypes of the parts of a quantised weight, see `quantized_tensors.py`."""
_STORED_DTYPES = DTYPES | QUANTIZED_DTYPES
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT_BYTES = 8
"""Header alignment of the safetensors library."""
DEFAULT_METADATA = MappingProxyType({"format": "pt"})
"""Metadata that transformers writes into every file."""
BLOCK_BYTES = 1 << 24
"""Bytes per read if a tensor need not be in memory."""


OnRows = Callable[["TensorLocation", int, Tensor], None]


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a file."""

    file: Path
    dtype: str
    """Name of the dtype in the format: BF16, F32 and so on."""
    shape: tuple[int, ...]
    start: int
    """Byte offset of the tensor's values in the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * _STORED_DTYPES[self.dtype].itemsize

    def read(self, index: Sequence[slice], on_rows: OnRows | None = None) -> Tensor:
        """Read a part of the tensor into a new tensor. Only the rows of the part are read.

        Args:
            index: a slice of every dim, with start, stop and step given.
            on_rows: called with the rows that were read, and the byte offset of the first within the tensor. Not called
                for a tensor that is computed from others.
        """
        dtype = _STORED_DTYPES[self.dtype]
        if not self.shape:
            value = _read_values(self.file, self.start, 1, dtype)
            if on_rows is not None:
                on_rows(self, 0, value)
            return value.view(())
        rows = index[0]
        num_rows = max(0, rows.stop - rows.start)
        row_shape = self.shape[1:]
        start = self.start + rows.start * math.prod(row_shape) * dtype.itemsize
        values = _read_values(self.file, start, num_rows * math.prod(row_shape), dtype).view(num_rows, *row_shape)
        if on_rows is not None:
            on_rows(self, start - self.start, values)
        region = values[(slice(0, num_rows, rows.step), *index[1:])]
        return region if region.numel() == values.numel() else region.contiguous()

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Read some rows of the tensor, or its only value."""
        return self.read((slice(start, stop, 1), *(slice(0, size, 1) for size in self.shape[1:])))

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes of the values, at most `BLOCK_BYTES` at a time."""
        remaining = self.num_bytes
        with open_regular(self.file) as opened:
            opened.seek(self.start)
            while remaining:
                block = opened.read(min(remaining, BLOCK_BYTES))
                if not block:
                    raise ConfigError(f"{str(self.file)!r} ends before its tensors do")
                yield block
                remaining -= len(block)


def read_header(file: Path, *, allows_quantized: bool = False) -> dict[str, TensorLocation]:
    """Return the tensors of a file by name.

    Args:
        allows_quantized: also accept the dtypes of `QUANTIZED_DTYPES`.

    Raises:
        ConfigError: the file cannot be read, is not a safetensors file, has missing or extra bytes, or has a tensor
            with an unsupported dtype.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{str(file)!r} is not a safetensors file, or was cut off in its header")
            header = parse_json(opened.read(length))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{str(file)!r} is not a safetensors file: its header is not JSON") from None
    locations = {}
    end = 0
    legal = _STORED_DTYPES if allows_quantized else DTYPES
    entries = [item for item in header.items() if item[0] != "__metadata__"] if isinstance(header, dict) else []
    try:
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            first, last = _parse_sizes(entry["data_offsets"])
            if not name.isprintable():
                raise ConfigError(f"{str(file)!r} holds a tensor of the name {name!r}, which is not a printable text")
            if entry["dtype"] not in legal:
                raise ConfigError(
                    f"{str(file)!r}: tensor {name} has type {entry['dtype']}; moefold reads {', '.join(legal)} here"
                )
            locations[name] = TensorLocation(file, entry["dtype"], _parse_sizes(entry["shape"]), 8 + length + first)
            if first != end or last - first != locations[name].num_bytes:
                raise ConfigError(f"{str(file)!r}: tensor {name} does not fill the bytes that the header gives it")
            end = last
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{str(file)!r} is not a safetensors file: its header makes no sense") from None
    if size != 8 + length + end:
        lacking = 8 + length + end - size
        has, promise = ("lacks", "its header promises") if lacking > 0 else ("has", "no tensor owns")
        raise ConfigError(f"{str(file)!r} {has} {abs(lacking)} bytes at its end that {promise}")
    return locations


def read_metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a file that `read_header` accepts."""
    with open_regular(file) as opened:
        header = parse_json(opened.read(int.from_bytes(opened.read(8), "little")))
    table = header.get("__metadata__", {})
    return {key: value for key, value in table.items() if isinstance(value, str)} if isinstance(table, dict) else {}


def _parse_sizes(numbers: Any) -> tuple[int, ...]:
    """Parse a list of non-negative integers. Raise ValueError for anything else."""
    if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(numbers)
    return tuple(numbers)


def bytes_equal(first: TensorLocation, other: TensorLocation) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(first.blocks(), other.blocks(), strict=True))


def _read_values(file: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(count, dtype=dtype)
    if count == 0:
        return values
    with file.open("rb", buffering=0) as opened:
        if not isinstance(file, RemotePath) and start % dtype.itemsize == 0:
            return _map_values(opened, start, values)
        target = bytes_of(values)
        opened.seek(start)
        done_bytes = 0
        while done_bytes < len(target):
            num_read = opened.readinto(target[done_bytes : done_bytes + BLOCK_BYTES])
            if not num_read:
                raise ConfigError(f"{str(file)!r} ends before its tensors do")
            done_bytes += num_read
    return values


def _map_values(opened: Any, start: int, like: Tensor) -> Tensor:
    """Map values of a file into memory until the tensor is freed. Writing to the tensor does not change the file."""
    end = start + like.nbytes
    if os.fstat(opened.fileno()).st_size < end:
        raise ConfigError(f"{opened.name!r} ends before its tensors do")
    first = start - start % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(opened.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
    return torch.frombuffer(pages, dtype=like.dtype, count=like.numel(), offset=start - first)


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file to write: its header, and the location of each tensor."""

    header: bytes
    tensors: dict[str, TensorLocation]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(stored.num_bytes for stored in self.tensors.values())


def plan_file_layout(
    file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = DEFAULT_METADATA
) -> FileLayout:
    """Compute the layout of a file.

    Args:
        tensors: dtype name and shape by name, in the order of the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    starts = {}
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * _STORED_DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        starts[name] = offset
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    locations = {
        name: TensorLocation(file, dtype, shape, len(header) + starts[name]) for name, (dtype, shape) in tensors.items()
    }
    return FileLayout(header, locations)


class FileWriter(ExitStack):
    """Writer of tensors into files from `create_file`. Several processes may write into one file."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def write(self, location: TensorLocation, data: memoryview, offset: int = 0) -> None:
        """Write bytes of one tensor, starting at a byte offset within the tensor."""
        if location.file not in self._open:
            self._open[location.file] = self.enter_context(location.file.open("r+b", buffering=0))
        opened = self._open[location.file]
        opened.seek(location.start + offset)
        done_bytes = 0
        while done_bytes < len(data):
            done_bytes += opened.write(data[done_bytes : done_bytes + BLOCK_BYTES])


def create_file(file: Path, layout: FileLayout) -> None:
    """Create a file with its header and its full size."""
    with file.open("wb") as opened:
        opened.write(layout.header)
        opened.truncate(layout.num_bytes)


def bytes_of(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    array: Any = values.detach().flatten().view(torch.uint8).numpy()
    return memoryview(array)
