"""Validate the shards in a checkpoint's data files before torch reads them: zip archives written by `torch.save`.

Each archive must have the size and dtype of the index, must be uncompressed, and its pickle must build a tensor and
nothing else. So reading it takes no more memory than the tensor.
"""

import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import SEEK_CUR, BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moefold.bounded_read import open_regular
from moefold.comm.torch_compat import StorageInfo
from moefold.remote_path import RemotePath

_ZIP64_END = struct.Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_ZIP_END = struct.Struct("<4sHHHHIIH")
_TAIL_BYTES = _ZIP64_END.size + _ZIP64_LOCATOR.size + _ZIP_END.size
"""Size of the end of an archive: zip64 end of central directory, its locator, and the pre-zip64 end record."""
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_ENTRIES = 64
_MAX_DIRECTORY_BYTES = 1 << 16
_MAX_PICKLE_BYTES = 1 << 12
_ZIP64_SENTINEL = 0xFFFFFFFF
"""Value of a 32-bit field whose 64-bit number is in the zip64 extra field."""
_ALLOWED_OPCODES = frozenset(
    ("PROTO", "GLOBAL", "BINPUT", "BINGET", "MARK", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "TUPLE")
    + ("TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "BINPERSID", "NEWFALSE", "NEWTRUE", "NONE", "REDUCE", "STOP")
)
_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtypes that have a typed storage class; for other dtypes the tensor's arguments hold the dtype."""


@dataclass(frozen=True)
class StoredPart:
    """The index entry of a shard."""

    name: str
    storage_info: StorageInfo
    sizes: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _ZipEntry:
    """A file in a zip archive."""

    size: int
    header_offset: int


@dataclass(frozen=True)
class _StorageRef:
    """A reference of a pickled tensor to its storage."""

    dtype: torch.dtype | None
    key: str
    count: int


class _TensorArgs:
    """Placeholder that records the arguments of `torch._utils._rebuild_tensor_v2`."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> None:
        self.storage = storage
        self.offset = offset
        self.size = size
        self.stride = stride
        self.dtype = others[2] if len(others) > 2 else None


def check_parts(folder: Path, parts: Iterable[StoredPart]) -> None:
    """Check shards of a checkpoint against their index entries; reads a few hundred bytes of each.

    Raises:
        OSError: a file cannot be read.
        ValueError: a shard is not the tensor of the index.
    """
    ordered = sorted(parts, key=lambda part: (part.storage_info.relative_path, part.storage_info.offset))
    for file, inside in groupby(ordered, key=lambda part: part.storage_info.relative_path):
        with open_regular(folder / file) as opened:
            for part in inside:
                try:
                    _check_part(opened, part)
                except (ValueError, struct.error) as error:
                    raise ValueError(f"file {file} holds something else where {part.name} belongs: {error}") from None


def read_part(path: RemotePath, part: StoredPart) -> BytesIO:
    """Read a shard of a remote checkpoint by one request, and check it against its index entry.

    Args:
        path: the data file.
        part: the index entry.

    Raises:
        OSError: the file cannot be read.
        ValueError: the shard is not the tensor of the index.
    """
    info = part.storage_info
    content = BytesIO(path.read_range(info.offset, info.length))
    try:
        _check_part(content, replace(part, storage_info=StorageInfo(info.relative_path, 0, info.length)))
    except (ValueError, struct.error) as error:
        name = info.relative_path
        raise ValueError(f"file {name} holds something else where {part.name} belongs: {error}") from None
    content.seek(0)
    return content


def values_offset(file: BinaryIO, part: StoredPart) -> int:
    """Return where the values of a shard begin in a data file, in bytes; they follow in row-major order.

    Raises:
        OSError: the file cannot be read.
        ValueError: the shard is not the tensor of the index, or its values are not contiguous.
    """
    try:
        tensor, values = _check_part(file, part)
        expected = 1
        for stride, size in reversed(list(zip(tensor.stride, tensor.size, strict=True))):
            if size > 1 and stride != expected:
                raise ValueError("a tensor whose rows are not contiguous")
            expected *= size
        header_at = part.storage_info.offset + values.header_offset
        file.seek(header_at)
        header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        if header[0] != b"PK\3\4":
            raise ValueError("a broken archive")
    except (ValueError, struct.error) as error:
        name = part.storage_info.relative_path
        raise ValueError(f"file {name} holds something else where {part.name} belongs: {error}") from None
    start: int = header_at + _LOCAL_HEADER.size + header[9] + header[10] + tensor.offset * part.dtype.itemsize
    return start


def _check_part(file: BinaryIO, part: StoredPart) -> tuple[_TensorArgs, _ZipEntry]:
    """Check a shard against its index entry; return the arguments of its tensor and the file of its values."""
    entries = _read_directory(file, part.storage_info.offset, part.storage_info.length)
    if "data.pkl" not in entries:
        raise ValueError("it has no data.pkl")
    tensor = _parse_tensor_pickle(_read_entry(file, part.storage_info.offset, entries["data.pkl"]))
    storage = tensor.storage
    dtype = tensor.dtype if storage.dtype is None else storage.dtype
    if not isinstance(dtype, torch.dtype) or (tensor.size, dtype) != (tuple(part.sizes), part.dtype):
        raise ValueError("a tensor of another shape or type")
    if not isinstance(tensor.stride, tuple) or len(tensor.stride) != len(tensor.size):
        raise ValueError("a tensor without strides")
    numbers = (tensor.offset, *tensor.stride)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor without strides")
    last = tensor.offset + sum(stride * (size - 1) for stride, size in zip(tensor.stride, tensor.size, strict=True))
    values = entries.get(f"data/{storage.key}")
    # The count of an untyped storage is in bytes.
    num_bytes = storage.count * (1 if storage.dtype is None else dtype.itemsize)
    fits = not part.sizes.numel() or (last + 1) * dtype.itemsize <= num_bytes
    if values is None or values.size != num_bytes or not fits:
        raise ValueError("a tensor without its values")
    return tensor, values


def _read_directory(file: BinaryIO, start: int, length: int) -> dict[str, _ZipEntry]:
    """Read the central directory of a `torch.save` archive at an offset of a file.

    Raises:
        ValueError: it is not such an archive, a file is compressed, or two files overlap.
    """
    at, size, count = _locate_directory(file, start, length)
    file.seek(start + at)
    directory = file.read(size)
    entries: dict[str, _ZipEntry] = {}
    place = 0
    for _ in range(count):
        name, entry, place = _parse_entry(directory, place)
        if name in entries:
            raise ValueError("an archive with a name twice")
        entries[name] = entry
    if sum(entry.size for entry in entries.values()) > at:
        raise ValueError("an archive whose files are larger than it is")
    return entries


def _locate_directory(file: BinaryIO, start: int, length: int) -> tuple[int, int, int]:
    """Return offset, size and number of entries of the central directory."""
    if length < _TAIL_BYTES:
        raise ValueError("no archive")
    file.seek(start + length - _TAIL_BYTES)
    tail = file.read(_TAIL_BYTES)
    mark, _, _, _, _, _, on_disk, count, size, at = _ZIP64_END.unpack_from(tail)
    locator = _ZIP64_LOCATOR.unpack_from(tail, _ZIP64_END.size)
    old = _ZIP_END.unpack_from(tail, _ZIP64_END.size + _ZIP64_LOCATOR.size)
    if (mark, locator[0], old[0]) != (b"PK\6\6", b"PK\6\7", b"PK\5\6"):
        raise ValueError("no archive")
    # A reader may use either record, so the two must agree.
    same_count = on_disk == count and all(number in (count, 0xFFFF) for number in old[3:5])
    same_place = old[5] in (size, _ZIP64_SENTINEL) and old[6] in (at, _ZIP64_SENTINEL)
    is_contiguous = at + size == length - _TAIL_BYTES == locator[2] and old[7] == 0
    if not (same_count and same_place and is_contiguous and count <= _MAX_ENTRIES and size <= _MAX_DIRECTORY_BYTES):
        raise ValueError("an archive of another layout")
    return at, size, count


def _parse_entry(directory: bytes, offset: int) -> tuple[str, _ZipEntry, int]:
    """Return name and location of a file of an archive, and the offset of the next directory entry."""
    fields = _CENTRAL_HEADER.unpack_from(directory, offset)
    method = fields[4]
    packed = fields[8]
    size = fields[9]
    name_bytes = fields[10]
    extra_bytes = fields[11]
    comment_bytes = fields[12]
    header_at = fields[16]
    name_at = offset + _CENTRAL_HEADER.size
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes + comment_bytes
    if fields[0] != b"PK\1\2" or end > len(directory):
        raise ValueError("a broken archive")
    zip64 = _zip64_numbers(directory[extra_at : extra_at + extra_bytes])
    size, packed, header_at = (
        (zip64.pop(0) if zip64 else number) if number == _ZIP64_SENTINEL else number
        for number in (size, packed, header_at)
    )
    if method or packed != size:
        raise ValueError("a compressed archive")
    name = directory[name_at:extra_at].decode("utf-8").partition("/")[2]
    return name, _ZipEntry(size, header_at), end


def _zip64_numbers(extra: bytes) -> list[int]:
    """Return the 64-bit numbers in the zip64 extra field (kind 1) of a directory entry."""
    place = 0
    while place + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            return [number for (number,) in struct.iter_unpack("<Q", extra[place + 4 : place + 4 + size // 8 * 8])]
        place += 4 + size
    return []


def _read_entry(file: BinaryIO, start: int, entry: _ZipEntry) -> bytes:
    """Read a small file of an archive."""
    if entry.size > _MAX_PICKLE_BYTES:
        raise ValueError("a long pickle")
    file.seek(start + entry.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if header[0] != b"PK\3\4":
        raise ValueError("a broken archive")
    file.seek(header[9] + header[10], SEEK_CUR)
    return file.read(entry.size)


def _parse_tensor_pickle(pickled: bytes) -> _TensorArgs:
    """Return the arguments of a pickled tensor, without executing the pickle.

    Raises:
        ValueError: the pickle is not of a tensor.
    """
    try:
        if any(operation.name not in _ALLOWED_OPCODES for operation, _, _ in pickletools.genops(pickled)):
            raise ValueError("no tensor")
        found = _TensorUnpickler(BytesIO(pickled)).load()
    except (AttributeError, EOFError, IndexError, KeyError, TypeError, OverflowError, pickle.UnpicklingError) as error:
        raise ValueError(f"no tensor ({error or type(error).__name__})") from None
    if not isinstance(found, _TensorArgs) or not isinstance(found.storage, _StorageRef):
        raise ValueError("no tensor")
    return found


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that replaces all classes and storages by placeholders."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _TensorArgs
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> _StorageRef:
        kind, dtype, key, _, count = pid
        if kind != "storage" or type(key) is not str or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("no storage")
        return _StorageRef(dtype, key, count)
