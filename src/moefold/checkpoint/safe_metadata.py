"""Read the DCP index of a checkpoint (`.metadata`, a pickle) without executing code that it may contain.

The pickle's opcodes are checked first. Only opcodes that an index needs are allowed, because a few bytes of others
create a memo of gigabytes, or text that fills the memory. The memory for allowed opcodes is proportional to the file:
at most a few times the memory for an equally large index written by DCP.
"""

import math
import pickle
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moefold.bounded_read import batch_by_size, open_regular, read_bytes
from moefold.checkpoint.manifest import check_file_name, file_sizes, regular_file
from moefold.checkpoint.shard_file import StoredShard, read_shard
from moefold.comm.private_torch import StorageInfo
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import RemotePath

METADATA_FILE = ".metadata"
REMOTE_READERS = 4
"""Concurrent requests of a rank: many small requests one after the other are slow."""
REMOTE_BATCH_BYTES = 1 << 28
"""Bytes of the shards in memory at a time, unless one shard is larger."""
MAX_DIMS = 64
"""Maximum number of dims of a tensor in torch."""
_ALLOWED_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
}
"""Classes that an index may refer to, by module. `_InertObject` subclasses replace them."""
_UNPICKLE_ERRORS = (
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Exceptions that unpickling raises on files that are not an index."""


class SafeReader(dcp.FileSystemReader):
    """DCP reader that does not execute code from a checkpoint's index.

    `read_shard` reads the tensors, without executing code.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index with the module's `read_metadata`."""
        content = read_metadata(_folder_of(self))
        content.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        self._shards = shards_of(content)
        return content

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each shard of a plan once, from a remote folder with concurrent requests."""
        folder = _folder_of(self)
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: self._place(item.storage_index)):
            items.setdefault(item.storage_index, []).append(item)

        def fetch(index: MetadataIndex) -> Tensor:
            return read_shard(folder, self._shards[index])

        with ThreadPoolExecutor(REMOTE_READERS) as readers:
            fetch_all = readers.map if isinstance(folder, RemotePath) else map
            for batch in batch_by_size(items, lambda item: self._shards[item].storage_info.length, REMOTE_BATCH_BYTES):
                for index, shard in zip(batch, fetch_all(fetch, batch), strict=True):
                    _copy_shard(shard, items[index], planner)
        result: Future[None] = Future()
        result.set_result(None)
        return result

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        """Return file and offset of a shard. Sorting by it reads a file from start to end."""
        place = self._shards[index].storage_info
        return place.relative_path, place.offset


def _copy_shard(shard: Tensor, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Copy the requested parts of a shard."""
    for item in items:
        values = shard
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, size)
        target = planner.resolve_tensor(item).detach()
        if target.shape != values.shape:
            raise ValueError(f"a part has shape {list(values.shape)}, not {list(target.shape)}")
        target.copy_(values)
        planner.commit_tensor(item, target)


def _folder_of(reader: dcp.FileSystemReader) -> Path:
    """Return the folder of a reader, local or remote: `Path()` would turn a remote path into a local path."""
    return reader.path if isinstance(reader.path, Path) else Path(reader.path)


def read_metadata(folder: Path) -> Metadata:
    """Read and validate the index of a checkpoint folder.

    The result is rebuilt from plain numbers and names, so it shares no object with the pickle. Each tensor is backed by
    bytes of a file, so a forged size cannot cause a large allocation.

    Raises:
        OSError: the index cannot be read.
        ValueError: the file is not an index, refers to more than plain data, contradicts itself or the sizes of the
            files, or leads out of the folder.
    """
    try:
        pickled = _read_pickle(regular_file(folder, METADATA_FILE))
        check_opcodes(pickled)
        content = _rebuild(_RestrictedUnpickler(BytesIO(pickled)).load())
    except _UNPICKLE_ERRORS as error:
        raise ValueError(f"{METADATA_FILE} is not an index of a checkpoint: {error or type(error).__name__}") from None
    for name in {info.relative_path for info in content.storage_data.values()}:
        check_file_name(folder, name)
    return content


def check_tensor_files(path: Path, metadata: Metadata) -> None:
    """Check that the data files of a checkpoint exist and are long enough, without reading them.

    Raises:
        ConfigError: a file is missing or too short.
    """
    if faults := missing_or_short_files(path, metadata):
        raise ConfigError(f"checkpoint {str(path)!r} is damaged, it lacks {format_list(faults)}")


def missing_or_short_files(path: Path, metadata: Metadata) -> list[str]:
    """Return the data files that are missing or too short."""
    needed_bytes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed_bytes[info.relative_path] = max(needed_bytes.get(info.relative_path, 0), info.offset + info.length)
    sizes = file_sizes(path)
    return [
        f"the end of file {name}" if name in sizes else f"file {name}"
        for name, size in sorted(needed_bytes.items())
        if sizes.get(name, -1) < size
    ]


def shards_of(content: Metadata) -> dict[MetadataIndex, StoredShard]:
    """Return the shards that an index lists, each with its location."""
    places = content.storage_data or {}
    shards = {}
    for name, stored in content.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name} is not a tensor"
        for chunk in stored.chunks:
            index = MetadataIndex(name, chunk.offsets)
            shards[index] = StoredShard(name, places[index], chunk.sizes, stored.properties.dtype)
    return shards


def _read_pickle(path: Path) -> bytes:
    """Read the pickled index. Stop after the first bytes if the header is wrong."""
    with open_regular(path) as file:
        if not file.peek(len(PICKLE_HEADERS[0])).startswith(PICKLE_HEADERS):
            raise ValueError("it is not a pickle of protocol 4 or 5")
    return read_bytes(path, MAX_INDEX_BYTES)


def _rebuild(value: Any) -> Metadata:
    """Rebuild the index from its placeholders, and validate each part.

    Raises:
        ValueError: the index differs from DCP's index of a state of tensors.
        AttributeError, TypeError: the same.
    """
    _check_class(value, "Metadata")
    places = {
        MetadataIndex(_check_text(index.fqn), _rebuild_size(index.offset)): _rebuild_storage_info(info)
        for index, info in value.storage_data.items()
    }
    # In a forged index tensors may share one list of chunks, which would be checked once per tensor.
    if sum(len(stored.chunks) for stored in value.state_dict_metadata.values()) > len(places):
        raise ValueError("it has more parts than places for them")
    tensors = {_check_text(name): _rebuild_tensor(stored) for name, stored in value.state_dict_metadata.items()}
    for name, stored in tensors.items():
        _check_chunks(name, stored, places)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _rebuild_tensor(stored: Any) -> TensorStorageMetadata:
    _check_class(stored, "TensorStorageMetadata")
    dtype = stored.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no type")
    chunks = [ChunkStorageMetadata(_rebuild_size(chunk.offsets), _rebuild_size(chunk.sizes)) for chunk in stored.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _rebuild_size(stored.size), chunks)


def _check_chunks(name: str, stored: TensorStorageMetadata, storage_infos: Mapping[MetadataIndex, StorageInfo]) -> None:
    """Check that the chunks lie within the tensor, have its number of values in total, and have enough bytes."""
    offsets = {chunk.offsets for chunk in stored.chunks}
    fits = all(
        len(chunk.sizes) == len(chunk.offsets) == len(stored.size)
        and all(a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, stored.size, strict=True))
        for chunk in stored.chunks
    )
    num_values = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    if not fits or len(offsets) != len(stored.chunks) or num_values != math.prod(stored.size):
        raise ValueError(f"the parts of {name} are not the whole of it")
    for chunk in stored.chunks:
        place = storage_infos.get(MetadataIndex(name, chunk.offsets))
        needed_bytes = math.prod(chunk.sizes) * stored.properties.dtype.itemsize
        if place is None or place.length < needed_bytes:
            has = "none" if place is None else str(place.length)
            raise ValueError(f"a part of {name} needs {needed_bytes} bytes, it has {has}")


def _rebuild_storage_info(info: Any) -> StorageInfo:
    numbers = (info.offset, info.length)
    transforms = getattr(info, "transform_descriptors", None)
    if not all(type(number) is int and number >= 0 for number in numbers) or transforms:
        raise ValueError("a part has no place")
    return StorageInfo(_check_text(info.relative_path), *numbers)


def _rebuild_size(numbers: Any) -> torch.Size:
    is_row = isinstance(numbers, tuple) and len(numbers) <= MAX_DIMS
    if not is_row or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("a size is not a row of numbers")
    return torch.Size(numbers)


def _check_class(value: Any, name: str) -> None:
    if not isinstance(value, _InertObject) or type(value).__name__ != name:
        raise ValueError(f"it has {type(value).__name__} where {name} belongs")


def _check_text(name: Any) -> str:
    if type(name) is not str:
        raise ValueError("a name is not a text")
    return name


class _InertObject:
    """Placeholder for the classes of an index: stores what the pickle assigns and executes nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.__dict__.update(state)
        else:
            self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that replaces the classes of an index by new classes, which a pickle may modify, and refuses others."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, type], type] = {}

    def _placeholder_class(self, name: str, base: type) -> type:
        """Return the cached placeholder class of a name. A class takes more memory than its name in the file."""
        if (name, base) not in self._classes:
            self._classes[name, base] = type(name, (base,), {})
        return self._classes[name, base]

    def find_class(self, module: str, name: str) -> Any:
        # Some releases of Python 3.11 pickle an enum member as getattr(class, name): the call is not executed here.
        if name in _ALLOWED_CLASSES.get(module, ()) or (module, name) == ("builtins", "getattr"):
            return self._placeholder_class(name, _InertObject)
        if module.startswith("pathlib"):
            return self._placeholder_class("Path", _InertObject)
        if (module, name) == ("torch", "Size"):
            return self._placeholder_class(name, tuple)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which an index has no use for")


MAX_INDEX_BYTES = 1 << 30
"""Size limit of an index: 10 million parts of about 100 bytes, as written by 1,024 ranks with 10,000 tensors."""
PICKLE_HEADERS = (b"\x80\x04", b"\x80\x05")
"""Headers of pickle protocols 4 and 5: all Python versions for torch write one of them."""
_MAX_RUN_OPCODES = 4096
_SPARE_OPCODES = 1 << 16
_TEXT_OPCODE = re.compile(rb"\x8c(.)|X(.{4})", re.DOTALL)
_ONE_BYTE_OPCODES = b"()NRabestu]}\x81\x85\x86\x87\x88\x89\x93\x94"
"""One-byte opcodes, each of which may allocate up to 64 bytes.

MARK EMPTY_TUPLE NONE REDUCE APPEND BUILD APPENDS SETITEM TUPLE SETITEMS EMPTY_LIST EMPTY_DICT NEWOBJ TUPLE1 to TUPLE3
NEWTRUE NEWFALSE STACK_GLOBAL MEMOIZE.
"""
_OPCODE_RUN = re.compile(
    b"(?:["
    + re.escape(_ONE_BYTE_OPCODES)
    + rb"]|[hK].|M..|[Jj].{4}|\x95.{8}|\x80[\x04\x05]|"
    # BINGET BININT1 BININT2 BININT LONG_BINGET FRAME PROTO, and LONG1 of up to 9 bytes.
    + b"|".join(b"\\x8a" + bytes([count]) + b".{%d}" % count for count in range(9))
    + rb"|\x8a\x09.{9}){1,%d}+" % _MAX_RUN_OPCODES,
    re.DOTALL,
)


def check_opcodes(pickled: bytes) -> None:
    """Check that a pickle has only opcodes of an index, and at most an index's share of one-byte opcodes.

    Raises:
        ValueError: other opcodes, too many, or no end.
    """
    if not pickled.startswith(PICKLE_HEADERS):
        raise ValueError("it is not a pickle of protocol 4 or 5")
    # In an index of DCP a third of the bytes are such opcodes. Bytes within numbers and texts are also counted.
    if len(pickled) - len(pickled.translate(None, delete=_ONE_BYTE_OPCODES)) > len(pickled) // 2 + _SPARE_OPCODES:
        raise ValueError("it has more operations than an index of its size")
    offset = 0
    while True:
        if run := _OPCODE_RUN.match(pickled, offset):
            offset = run.end()
        elif text := _TEXT_OPCODE.match(pickled, offset):
            offset = text.end() + int.from_bytes(text[1] or text[2], "little")
        elif pickled[offset : offset + 1] == b".":
            return
        else:
            raise ValueError(f"byte {offset} is not an operation of an index")
