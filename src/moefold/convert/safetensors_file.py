"""The safetensors format: a length, a JSON header, then the bytes of the tensors. Read and written piece by piece.

The library of that name wants all tensors of a file in memory to write it, and maps files into memory to read them,
which counts as resident; converting a model that exceeds the memory needs neither. Nothing is unpickled.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from moefold.bounded_read import open_regular, parse_json
from moefold.errors import ConfigError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that are read and written; quantised ones need their own maths."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""As in the library."""
ALIGNMENT_BYTES = 8
"""The library pads headers to this."""
DEFAULT_METADATA = MappingProxyType({"format": "pt"})
"""What transformers writes into every file."""
BLOCK_BYTES = 1 << 24
"""So much is read at a time where a tensor need not be in memory."""


@dataclass(frozen=True)
class TensorLocation:
    """A tensor in a file."""

    file: Path
    dtype: str
    """As the format spells it: BF16, F32 and so on."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file where its values begin."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(file: Path) -> dict[str, TensorLocation]:
    """The tensors of a file by name.

    Raises:
        ConfigError: the file cannot be read, is no safetensors file, lacks bytes or has some too many, or holds a
            tensor of a type that is not among `DTYPES`.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{str(file)!r} is no safetensors file, or was cut off in its header")
            header = parse_json(opened.read(length))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{str(file)!r} is no safetensors file: its header is not JSON") from None
    found, end = {}, 0
    entries = [item for item in header.items() if item[0] != "__metadata__"] if isinstance(header, dict) else []
    try:
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            first, last = _parse_sizes(entry["data_offsets"])
            if not name.isprintable():
                raise ConfigError(f"{str(file)!r} holds a tensor of the name {name!r}, which is no printable text")
            if entry["dtype"] not in DTYPES:
                raise ConfigError(
                    f"{str(file)!r}: tensor {name} has type {entry['dtype']}; "
                    f"moefold reads {', '.join(DTYPES)}, not quantised weights"
                )
            found[name] = TensorLocation(file, entry["dtype"], _parse_sizes(entry["shape"]), 8 + length + first)
            if first != end or last - first != found[name].num_bytes:
                raise ConfigError(f"{str(file)!r}: tensor {name} does not fill the bytes that the header gives it")
            end = last
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{str(file)!r} is no safetensors file: its header makes no sense") from None
    if size != 8 + length + end:
        has = "lacks" if size < 8 + length + end else "has"
        raise ConfigError(
            f"{str(file)!r} {has} {abs(8 + length + end - size)} bytes at its end {_describe_mismatch(has)}"
        )
    return found


def read_metadata(file: Path) -> dict[str, str]:
    """What a file that `read_header` has read says beside its tensors."""
    with open_regular(file) as opened:
        header = parse_json(opened.read(int.from_bytes(opened.read(8), "little")))
    found = header.get("__metadata__", {})
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _parse_sizes(numbers: Any) -> tuple[int, ...]:
    """A list of whole numbers from 0 on; ValueError for anything else."""
    if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(numbers)
    return tuple(numbers)


def read_part(location: TensorLocation, index: Sequence[slice]) -> Tensor:
    """The values of a part of a tensor, in a tensor of their own.

    Reads the rows (steps of the first dim) from the first to the last that the part touches, and no others.

    Args:
        location: the tensor.
        index: a slice of every dim, with start, stop and step given.
    """
    dtype = DTYPES[location.dtype]
    if not location.shape:
        return _read_values(location.file, location.start, 1, dtype).view(())
    rows = index[0]
    num_rows = max(0, rows.stop - rows.start)
    row_shape = location.shape[1:]
    start = location.start + rows.start * math.prod(row_shape) * dtype.itemsize
    values = _read_values(location.file, start, num_rows * math.prod(row_shape), dtype).view(num_rows, *row_shape)
    part = values[(slice(0, num_rows, rows.step), *index[1:])]
    return part if part.numel() == values.numel() else part.contiguous()


def read_blocks(location: TensorLocation) -> Iterator[bytes]:
    """The bytes of a tensor, BLOCK_BYTES at a time."""
    left = location.num_bytes
    with open_regular(location.file) as opened:
        opened.seek(location.start)
        while left:
            block = opened.read(min(left, BLOCK_BYTES))
            if not block:
                raise ConfigError(f"{str(location.file)!r} ends before its tensors do")
            yield block
            left -= len(block)


def bytes_equal(one: TensorLocation, other: TensorLocation) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(read_blocks(one), read_blocks(other), strict=True))


def _read_values(file: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(count, dtype=dtype)
    if count == 0:
        return values
    target = bytes_of(values)
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        done = 0
        while done < len(target):
            got = opened.readinto(target[done : done + BLOCK_BYTES])
            if not got:
                raise ConfigError(f"{str(file)!r} ends before its tensors do")
            done += got
    return values


def _describe_mismatch(has: str) -> str:
    return "that its header promises" if has == "lacks" else "that no tensor owns"


@dataclass(frozen=True)
class FileLayout:
    """What a file will hold: its header, and where each tensor goes."""

    header: bytes
    tensors: dict[str, TensorLocation]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(stored.num_bytes for stored in self.tensors.values())


def plan_file_layout(
    file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = DEFAULT_METADATA
) -> FileLayout:
    """Lay out a file.

    Args:
        file: where it will be.
        tensors: type (as the format spells it) and shape by name, in the order of the file.
        metadata: what it says beside them.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, starts = 0, {}
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: TensorLocation(file, dtype, shape, len(header) + starts[name]) for name, (dtype, shape) in tensors.items()
    }
    return FileLayout(header, placed)


class FileWriter:
    """Puts tensors into files whose headers stand already; several processes may write into one file."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in self._open.values():
            opened.close()

    def write(self, location: TensorLocation, data: memoryview, offset: int = 0) -> None:
        """Write the bytes of one tensor, or some of them from a byte of it on."""
        if location.file not in self._open:
            self._open[location.file] = location.file.open("r+b", buffering=0)
        opened = self._open[location.file]
        opened.seek(location.start + offset)
        done = 0
        while done < len(data):
            done += opened.write(data[done : done + BLOCK_BYTES])


def create_file(file: Path, layout: FileLayout) -> None:
    """Make a file with its header and its full size."""
    with file.open("wb") as opened:
        opened.write(layout.header)
        opened.truncate(layout.num_bytes)


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = values.detach().flatten().view(torch.uint8).numpy()
    return memoryview(array)
