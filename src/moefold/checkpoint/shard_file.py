"""Read the shards in a checkpoint's data files: zip archives written by `torch.save`.

Each archive must have the size and dtype of the index, must be uncompressed, and its pickle, which is not executed,
must describe a tensor and nothing else. Reading a shard therefore takes no more memory than the tensor.
"""

import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from io import SEEK_CUR, SEEK_END, SEEK_SET, BytesIO, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moefold.bounded_read import open_regular
from moefold.comm.private_torch import StorageInfo
from moefold.remote_path import RemotePath

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_ENTRIES = 64
_MAX_DIRECTORY_BYTES = 1 << 17
"""Maximum read size for the directory of an archive."""
_MAX_PICKLE_BYTES = 1 << 12
_BROKEN_ARCHIVE_ERRORS = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, struct.error)
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
"""Dtypes with a typed storage class. Other dtypes are in the tensor's arguments."""


@dataclass(frozen=True)
class StoredShard:
    """Index entry of a shard."""

    name: str
    storage_info: StorageInfo
    sizes: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _StorageRef:
    """Reference of a pickled tensor to its storage."""

    dtype: torch.dtype | None
    key: str
    count: int


class _TensorArgs:
    """Placeholder that records the arguments of `torch._utils._rebuild_tensor_v2`."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> None:
        self.storage = storage
        self.offset = offset
        self.size = size
        self.stride = stride
        self.dtype = more[2] if len(more) > 2 else None


def check_shards(folder: Path, shards: Iterable[StoredShard]) -> None:
    """Check shards of a checkpoint against their index entries by reading a few hundred bytes of each.

    Raises:
        OSError: a file cannot be read.
        ValueError: a shard is not the tensor of the index.
    """
    ordered = sorted(shards, key=lambda shard: (shard.storage_info.relative_path, shard.storage_info.offset))
    for file, in_file in groupby(ordered, key=lambda shard: shard.storage_info.relative_path):
        with open_regular(folder / file) as opened:
            for shard in in_file:
                _locate_values(opened, shard)


OnArchive = Callable[[StorageInfo, memoryview], None]
"""Callback that receives the place and the bytes of an archive."""


def read_shard(
    folder: Path, shard: StoredShard, rows: slice | None = None, on_archive: OnArchive | None = None
) -> Tensor:
    """Read a shard, or some rows (first dimension) of it. A remote shard is read whole by one request.

    Args:
        rows: rows to read. A local file is read only there.
        on_archive: called with the archive, which is then read whole. It excludes `rows`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the shard is not the tensor of the index.
    """
    path = folder / shard.storage_info.relative_path
    if isinstance(path, RemotePath) and rows is None:
        info = shard.storage_info
        content = BytesIO(path.read_range(info.offset, info.length))
        return _read_values(content, replace(shard, storage_info=replace(info, offset=0)), rows)
    with open_regular(path) as opened:
        if on_archive is not None and rows is None and shard.sizes.numel():
            return _read_archive(opened, shard, on_archive)
        return _read_values(opened, shard, rows)


def _read_archive(file: BinaryIO, shard: StoredShard, on_archive: OnArchive) -> Tensor:
    """Read a whole archive, and return its values without a copy."""
    tensor, start = _locate_values(file, shard)
    info = shard.storage_info
    content = bytearray(info.length)
    file.seek(info.offset)
    if file.readinto(content) != len(content):  # type: ignore[attr-defined]
        raise ValueError(f"file {info.relative_path} ends within {shard.name}")
    on_archive(info, memoryview(content))
    first = start - info.offset + tensor.offset * shard.dtype.itemsize
    count = _num_values(shard.sizes, tensor.stride)
    if first % shard.dtype.itemsize:
        # Archives of torch never have values there.
        content, first = content[first : first + count * shard.dtype.itemsize], 0
    return torch.frombuffer(content, dtype=shard.dtype, count=count, offset=first).as_strided(
        shard.sizes, tensor.stride
    )


def _read_values(file: BinaryIO, shard: StoredShard, rows: slice | None) -> Tensor:
    tensor, start = _locate_values(file, shard)
    size = list(shard.sizes)
    offset = tensor.offset
    if rows is not None:
        size[0] = rows.stop - rows.start
        offset += rows.start * tensor.stride[0]
    if 0 in size:
        return torch.empty(size, dtype=shard.dtype)
    content = bytearray(_num_values(size, tensor.stride) * shard.dtype.itemsize)
    file.seek(start + offset * shard.dtype.itemsize)
    if file.readinto(content) != len(content):  # type: ignore[attr-defined]
        raise ValueError(f"file {shard.storage_info.relative_path} ends within {shard.name}")
    return torch.frombuffer(content, dtype=shard.dtype).as_strided(size, tensor.stride)


def _num_values(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of storage values from the first to the last value of a non-empty tensor."""
    return 1 + sum(step * (count - 1) for step, count in zip(stride, size, strict=True))


def _locate_values(file: BinaryIO, shard: StoredShard) -> tuple[_TensorArgs, int]:
    """Check a shard against its index entry, and return the arguments of its tensor, and the offset of its storage.

    Raises:
        OSError: the file cannot be read.
        ValueError: the shard is not the tensor of the index.
    """
    try:
        return _check_shard(file, shard)
    except (ValueError, *_BROKEN_ARCHIVE_ERRORS) as error:
        name = shard.storage_info.relative_path
        reason = "no archive" if isinstance(error, zipfile.BadZipFile) else str(error)
        raise ValueError(f"file {name} holds something else where {shard.name} belongs: {reason}") from None


def _check_shard(file: BinaryIO, shard: StoredShard) -> tuple[_TensorArgs, int]:
    start, length = shard.storage_info.offset, shard.storage_info.length
    with zipfile.ZipFile(_FileSlice(file, start, length)) as archive:
        entries = _entries(archive, length)
        if "data.pkl" not in entries or entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
            raise ValueError("it has no data.pkl of a tensor")
        tensor = _parse_tensor_pickle(archive.read(entries["data.pkl"]))
    storage = tensor.storage
    dtype = tensor.dtype if storage.dtype is None else storage.dtype
    if not isinstance(dtype, torch.dtype) or (tensor.size, dtype) != (tuple(shard.sizes), shard.dtype):
        raise ValueError("a tensor of another shape or type")
    if not isinstance(tensor.stride, tuple) or len(tensor.stride) != len(tensor.size):
        raise ValueError("a tensor without strides")
    numbers = (tensor.offset, *tensor.stride)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor without strides")
    end = tensor.offset + _num_values(tensor.size, tensor.stride) if shard.sizes.numel() else 0
    values = entries.get(f"data/{storage.key}")
    # The count of an untyped storage is in bytes.
    num_bytes = storage.count * (1 if storage.dtype is None else dtype.itemsize)
    if values is None or values.file_size != num_bytes or end * dtype.itemsize > num_bytes:
        raise ValueError("a tensor without its values")
    file.seek(start + values.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    values_at = values.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
    if header[0] != b"PK\3\4" or values_at + num_bytes > length:
        raise ValueError("a broken archive")
    return tensor, start + values_at


def _entries(archive: zipfile.ZipFile, length: int) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a `torch.save` archive by their names, without the archive's own folder.

    Raises:
        ValueError: a file is compressed, or the files are too many or too large.
    """
    infos = archive.infolist()
    entries = {info.filename.partition("/")[2]: info for info in infos}
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in infos):
        raise ValueError("a compressed archive")
    if len(entries) != len(infos) or len(infos) > _MAX_ENTRIES or sum(info.file_size for info in infos) > length:
        raise ValueError("an archive of another layout")
    return entries


class _FileSlice(RawIOBase):
    """File object for a part of a file, with small reads."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._opened = file
        self._start = start
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        position = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._size}[whence] + offset
        if position < 0:
            raise ValueError("a broken archive")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        """Read bytes, up to the end of the part.

        Raises:
            ValueError: more bytes than in the directory of an archive.
        """
        remaining = max(0, self._size - self._position)
        size = remaining if size < 0 else min(size, remaining)
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError("an archive of another layout")
        self._opened.seek(self._start + self._position)
        content = self._opened.read(size)
        self._position += len(content)
        return content


def _parse_tensor_pickle(pickled: bytes) -> _TensorArgs:
    """Return the arguments of a pickled tensor, without executing the pickle.

    Raises:
        ValueError: the pickle does not describe a tensor.
    """
    try:
        if any(operation.name not in _ALLOWED_OPCODES for operation, _, _ in pickletools.genops(pickled)):
            raise ValueError("no tensor")
        args = _TensorUnpickler(BytesIO(pickled)).load()
    except (AttributeError, EOFError, IndexError, KeyError, TypeError, OverflowError, pickle.UnpicklingError) as error:
        raise ValueError(f"no tensor ({error or type(error).__name__})") from None
    if not isinstance(args, _TensorArgs) or not isinstance(args.storage, _StorageRef):
        raise ValueError("no tensor")
    return args


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
