"""Headers and indices of .bin token files of other programs: Megatron's .idx next to the file, and llm.c's header.

A .bin file without either is bare ids of data.token_dtype.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.data.shard_reader import ShardReader, TokenArraySpec
from moefold.errors import ConfigError

MEGATRON_SUFFIX = ".idx"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, number of sequences, number of documents + 1."""
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLM_C_HEADER = struct.Struct("<3i")
"""Magic, version, number of ids; the header is 256 int32 long."""
_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@dataclass(frozen=True)
class MegatronIndex:
    """Index of a Megatron data set: int32 lengths [N], int64 byte offsets [N] of sequences, int64 documents [M + 1].

    Attributes:
        path: the file.
        dtype: of the ids in the .bin.
        num_sequences: N.
        num_documents: M; document m begins with the sequence whose number is its element.
        num_tokens: ids in the .bin.
    """

    path: Path
    dtype: np.dtype[np.generic]
    num_sequences: int
    num_documents: int
    num_tokens: int

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.num_documents

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return for the documents start .. stop-1 one past their last token.

        Raises:
            BrokenShardError: the index cannot be read.
        """
        offset = _MEGATRON_HEADER.size + 4 * self.num_sequences
        offsets = self._open(offset, self.num_sequences)
        documents = self._open(offset + 8 * self.num_sequences, self.num_documents + 1)
        # Document m ends where the first sequence of document m + 1 begins, the last one at the end of the file.
        firsts = documents.read(start + 1, stop + 1).astype(np.int64)
        inner = firsts[firsts < self.num_sequences]
        ends = np.full(stop - start, self.num_tokens, dtype=np.int64)
        if len(inner):
            first = int(inner.min())
            found = offsets.read(first, int(inner.max()) + 1)
            ends[firsts < self.num_sequences] = found[inner - first] // self.dtype.itemsize
        return ends

    def _open(self, offset_bytes: int, count: int) -> ShardReader:
        return ShardReader(TokenArraySpec(self.path, str(self.path), offset_bytes, np.dtype("<i8"), count))


@dataclass(frozen=True)
class BinLayout:
    """Layout of a .bin file.

    Attributes:
        dtype: of the ids.
        offset_bytes: bytes before the first id.
        num_tokens: ids.
    """

    dtype: np.dtype[np.generic]
    offset_bytes: int
    num_tokens: int


def read_bin_layout(path: Path, token_dtype: str) -> BinLayout:
    """Return the layout of a .bin file: by Megatron's index, by llm.c's header, or bare ids of `token_dtype`.

    Raises:
        ConfigError: the size of the file is not what index, header or dtype say.
        OSError: the file cannot be read.
    """
    size_bytes = path.stat().st_size
    if (index := read_megatron_index(path)) is not None:
        return BinLayout(index.dtype, 0, index.num_tokens)
    with path.open("rb") as file:
        start = file.read(_LLM_C_HEADER.size)
    if len(start) == _LLM_C_HEADER.size:
        magic, version, count = _LLM_C_HEADER.unpack(start)
        name = _LLM_C_DTYPES.get((magic, version))
        if name is not None:
            dtype: np.dtype[np.generic] = np.dtype(name)
            if size_bytes != _LLM_C_HEADER_BYTES + count * dtype.itemsize:
                raise ConfigError(
                    f"{path} has the header of llm.c with {count} ids of {dtype.itemsize} bytes, and {size_bytes} "
                    "bytes; copy the file again"
                )
            return BinLayout(dtype, _LLM_C_HEADER_BYTES, count)
    dtype = np.dtype(token_dtype).newbyteorder("<")
    if size_bytes % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size_bytes} bytes, which is no multiple of the {dtype.itemsize} bytes of "
            f"data.token_dtype={token_dtype}; set the type it was written with, or copy the file again"
        )
    return BinLayout(dtype, 0, size_bytes // dtype.itemsize)


def read_megatron_index(path: Path) -> MegatronIndex | None:
    """Read the head of the .idx next to a .bin file; None if there is no such file.

    Raises:
        ConfigError: it is no index of Megatron, or of another file.
    """
    index = path.with_suffix(MEGATRON_SUFFIX)
    if path.suffix != ".bin" or not index.is_file():
        return None
    try:
        with index.open("rb") as file:
            head = file.read(_MEGATRON_HEADER.size)
            index_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"{index} cannot be read: {error.strerror}") from None
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(_MEGATRON_MAGIC):
        raise ConfigError(
            f"{index}, next to {path.name}, is no index of Megatron (MMIDIDX), the only one that is read; move it away "
            "if the .bin is bare ids of data.token_dtype"
        )
    _, version, code, num_sequences, num_ends = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ConfigError(
            f"{index} has version {version} and ids of type {code}; version 1 with types "
            f"{', '.join(map(str, _MEGATRON_DTYPES))}, whole numbers, is read: write the data again"
        )
    dtype: np.dtype[np.generic] = np.dtype(_MEGATRON_DTYPES[code])
    size_bytes = path.stat().st_size
    needed_bytes = _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_ends
    if index_bytes < needed_bytes or not num_ends:
        raise ConfigError(f"{index} has {index_bytes} of {needed_bytes} bytes; copy it again")
    found = MegatronIndex(index, dtype, num_sequences, num_ends - 1, size_bytes // dtype.itemsize)
    end_bytes = _end_of_last_sequence(found)
    if end_bytes != size_bytes:
        raise ConfigError(
            f"{path} has {size_bytes} bytes, and {index.name} is the index of a file with {end_bytes}; copy both again"
        )
    return found


def _end_of_last_sequence(index: MegatronIndex) -> int:
    """Return the byte after the last sequence."""
    count = index.num_sequences
    if not count:
        return 0
    with index.path.open("rb") as file:
        file.seek(_MEGATRON_HEADER.size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_MEGATRON_HEADER.size + 4 * count + 8 * (count - 1))
        (start,) = struct.unpack("<q", file.read(8))
    return int(start + length * index.dtype.itemsize)
