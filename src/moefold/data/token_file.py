"""Token files (.npy, and .bin of bare ids, of Megatron or of llm.c), their headers and their document indices."""

import os
import struct
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import check_regular_file
from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import (
    ENDS_SUFFIX,
    TOKEN_SUFFIXES,
    check_no_duplicates,
    data_file_path,
    data_paths,
    files_below,
)
from moefold.data.shard_reader import DocumentEnds, ShardReader, TokenArraySpec, map_npy, open_ends_file
from moefold.data.tokenize_record import check_finished
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

MEGATRON_SUFFIX = ".idx"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, number of sequences, number of documents + 1."""
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_INDEX_PART = 2**20
"""Sequences of an index that are read at a time."""
_LLM_C_HEADER = struct.Struct("<3i")
"""Magic, version, number of ids. The header is 256 int32 long."""
_LLM_C_HEADER_BYTES = 1024
_LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@dataclass(frozen=True)
class MegatronIndex:
    """Index of a Megatron data set: int32 lengths [N], int64 byte offsets [N] of sequences, int64 documents [M + 1].

    Document m begins with sequence documents[m]. The .bin has `num_tokens` ids of the dtype.
    """

    path: Path
    dtype: np.dtype[np.generic]
    num_sequences: int
    num_documents: int
    num_tokens: int

    def __len__(self) -> int:
        return self.num_documents

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions after the last tokens of the documents start .. stop-1.

        Raises:
            ValueError: the documents are not all sequences.
        """
        documents = self._open(self._offsets_start + 8 * self.num_sequences, self.num_documents + 1)
        # Document m ends where the first sequence of document m + 1 begins, the last one at the end of the file.
        firsts = documents.read(start, stop + 1).astype(np.int64)
        if (start == 0 and firsts[0]) or not ((firsts >= 0) & (firsts <= self.num_sequences)).all():
            raise ValueError(f"its documents are not the sequences 0 to {self.num_sequences}")
        first = int(firsts.min())
        offsets = self._open(self._offsets_start, self.num_sequences)
        bounds = offsets.read(first, min(int(firsts.max()) + 1, self.num_sequences)).astype(np.int64)
        starts = np.append(bounds // self.dtype.itemsize, self.num_tokens)
        return starts[firsts[1:] - first]

    def has_gaps(self) -> bool:
        """Return whether a sequence begins elsewhere than at the end of the one before it, reading lengths in parts."""
        lengths = self._open(_MEGATRON_HEADER.size, self.num_sequences, "<i4")
        offsets = self._open(self._offsets_start, self.num_sequences)
        end = 0
        for first in range(0, self.num_sequences, _INDEX_PART):
            stop = min(first + _INDEX_PART, self.num_sequences)
            begins = offsets.read(first, stop).astype(np.int64)
            ends = begins + lengths.read(first, stop).astype(np.int64) * self.dtype.itemsize
            if begins[0] != end or (begins[1:] != ends[:-1]).any() or (ends < begins).any():
                return True
            end = int(ends[-1])
        return False

    @property
    def _offsets_start(self) -> int:
        return _MEGATRON_HEADER.size + 4 * self.num_sequences

    def _open(self, offset_bytes: int, count: int, dtype: str = "<i8") -> ShardReader:
        return ShardReader(TokenArraySpec(self.path, str(self.path), offset_bytes, np.dtype(dtype), count))


def read_bin_header(path: Path, token_dtype: str) -> "TokenFile":
    """Return the layout of a .bin file: by Megatron's index, by llm.c's header, or bare ids of `token_dtype`.

    Raises:
        ConfigError: the size of the file contradicts the index, header or dtype.
    """
    size_bytes = path.stat().st_size
    if (index := read_megatron_index(path)) is not None:
        return TokenFile(path, index.num_tokens, index.dtype)
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
            return TokenFile(path, count, dtype, offset_bytes=_LLM_C_HEADER_BYTES)
    dtype = np.dtype(token_dtype).newbyteorder("<")
    if size_bytes % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size_bytes} bytes, which is not a multiple of the {dtype.itemsize} bytes of "
            f"data.token_dtype={token_dtype}; set the type it was written with, or copy the file again"
        )
    _check_width(path, dtype)
    return TokenFile(path, size_bytes // dtype.itemsize, dtype)


def _check_width(path: Path, dtype: np.dtype[np.generic]) -> None:
    """Refuse bare ids that are wider than `dtype`: every second one is then the upper half of an id, which is small."""
    with path.open("rb") as file:
        ids = np.frombuffer(file.read(_WIDTH_PROBE_IDS * dtype.itemsize), dtype).astype(np.int64)
    upper = ids[1::2]
    if (upper >= 0).all() and (upper < _UPPER_HALVES).all() and len(np.unique(ids[::2])) > 4 * _UPPER_HALVES:
        raise ConfigError(
            f"{path} has an id below {_UPPER_HALVES} in every second place of data.token_dtype={dtype.name}, as ids of "
            f"{2 * dtype.itemsize} bytes or more have; set data.token_dtype to the type it was written with"
        )


def read_megatron_index(path: Path) -> MegatronIndex | None:
    """Read the head of the .idx next to a .bin file, or return None if there is no such file.

    Raises:
        ConfigError: the file is not an index of Megatron, belongs to another file, or leaves out ids of the .bin.
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
            f"{index}, next to {path.name}, is not an index of Megatron (MMIDIDX), the only index that is read; "
            "move it away if the .bin is bare ids of data.token_dtype"
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
    megatron = MegatronIndex(index, dtype, num_sequences, num_ends - 1, size_bytes // dtype.itemsize)
    end_bytes = _end_of_last_sequence(megatron)
    if end_bytes != size_bytes:
        raise ConfigError(
            f"{path} has {size_bytes} bytes, and {index.name} is the index of a file with {end_bytes}; copy both again"
        )
    if megatron.has_gaps():
        raise ConfigError(
            f"{index} cannot be read with {path.name} as one stream of ids: its sequences do not follow each other in "
            "the .bin; write the data again, or move the index away to read all ids of the .bin as data.token_dtype"
        )
    return megatron


def _end_of_last_sequence(index: MegatronIndex) -> int:
    """Return the position of the byte after the last sequence."""
    count = index.num_sequences
    if not count:
        return 0
    with index.path.open("rb") as file:
        file.seek(_MEGATRON_HEADER.size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_MEGATRON_HEADER.size + 4 * count + 8 * (count - 1))
        (start,) = struct.unpack("<q", file.read(8))
    return int(start + length * index.dtype.itemsize)


_WIDTH_PROBE_IDS = 4096
_UPPER_HALVES = 4
"""Values of the upper 16 bits of the ids of a vocabulary of at most 262,144."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file of token ids: path and number of tokens."""

    path: Path
    num_tokens: int
    bin_dtype: np.dtype[np.generic] | None
    """Dtype of the ids of a raw .bin, or None for .npy, whose header has it."""
    name: str = ""
    """Name in the recipe. Empty means the path is used."""
    offset_bytes: int = 0
    """Bytes of a .bin before its first id."""

    @property
    def display_name(self) -> str:
        """Name in messages."""
        return self.name or str(self.path)

    def open(self) -> ShardReader:
        """Open the file to read ids from it. Raises BrokenShardError if the file is missing or has changed."""
        if self.bin_dtype is not None:
            return ShardReader(self.token_array_spec(self.offset_bytes, self.bin_dtype))
        expected = self.token_array_spec(0, np.dtype(np.uint8))
        try:
            array = map_npy(self.path)
        except ValueError as error:
            raise expected.broken_error(f"it is not a complete .npy array ({error})") from error
        if array.dtype.kind not in "iu" or array.shape != (self.num_tokens,):
            raise expected.broken_error(f"it holds {array.dtype} {list(array.shape)}, not {self.num_tokens} ids")
        assert isinstance(array, np.memmap)
        return ShardReader(self.token_array_spec(array.offset, array.dtype))

    def token_array_spec(self, offset_bytes: int, dtype: np.dtype[np.generic]) -> TokenArraySpec:
        """Return location, dtype and count of the ids."""
        return TokenArraySpec(self.path, self.display_name, offset_bytes, dtype, self.num_tokens, self.name)


def token_files(data: DataConfig, skipped: Set[Path] = frozenset()) -> tuple[TokenFile, ...]:
    """Return the .bin and .npy files that data.path names, folders recursively, except skipped files.

    Only headers and sizes are read. Files without tokens are ignored if others have tokens.
    """
    names = data.paths
    roots = data_paths(tuple(name for name in names if data_file_path(name, names) not in skipped), "tokens")
    for root in roots:
        check_finished(root)
    paths = tuple(
        file for root in roots for file in files_below(root) if not root.is_dir() or file.suffix in TOKEN_SUFFIXES
    )
    if not paths:
        raise ConfigError(
            f"{Setting('data.path', roots[0]):s} holds no .bin or .npy file; name token files or a folder with some"
        )
    check_no_duplicates(tuple(path.resolve() for path in paths))
    sound = (path for path in paths if path not in skipped)
    files = tuple(file for file in (read_header(path, data.token_dtype) for path in sound) if file.num_tokens)
    if not files:
        raise ConfigError(
            f"{Setting('data.path', roots[0]):s} is empty: no token in {len(paths)} file(s); name files with tokens"
        )
    return files


def document_ends_path(path: Path) -> Path:
    """Return the path of a token file's document index (little-endian int64 without a header), or of Megatron's."""
    index = path.with_suffix(ENDS_SUFFIX)
    megatron = path.with_suffix(MEGATRON_SUFFIX)
    return megatron if path.suffix == ".bin" and not index.exists() and megatron.exists() else index


def open_document_ends(path: Path, num_tokens: int, name: str = "") -> DocumentEnds:
    """Open the document index next to a token file. Raises ConfigError if it is missing, or belongs to another file."""
    index = document_ends_path(path)
    try:
        megatron = read_megatron_index(path) if index.suffix == MEGATRON_SUFFIX else None
        return DocumentEnds(open_ends_file(index, shard=name) if megatron is None else megatron, num_tokens)
    except OSError as error:
        rule = f"needs an index of documents next to {path}, and {index.name} cannot be read ({error})"
        way_out = "tokenise with `moefold tokenize`, or set data.document_end to the token that ends documents"
        raise ConfigError(Problem("data.document_index", True, rule, way_out)) from error
    except ValueError as error:
        raise ConfigError(
            f"{index} is not an index of the {num_tokens} tokens of {path.name}, at which it has to end, ascending "
            f"({error}); tokenise again"
        ) from error


def read_npy_header(path: Path) -> TokenFile:
    """Read the header of an .npy file of ids. Raises ConfigError if it is not one row of integers."""
    try:
        array = map_npy(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not a complete .npy array ({error}); write it again with numpy.save") from error
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {array.dtype}, but token ids are integers; save it as uint16 or uint32")
    if array.ndim != 1:
        raise ConfigError(f"{path} has shape {list(array.shape)}, but token ids are one row; save array.reshape(-1)")
    return TokenFile(path, len(array), None)


def read_header(path: Path, token_dtype: str) -> TokenFile:
    """Read the header and size of a token file: a .bin of whole ids, of Megatron or of llm.c, or a complete .npy."""
    if not os.access(path, os.R_OK):
        raise ConfigError(Problem("data.path", None, f": {path} is not readable", "give read access or leave it out"))
    try:
        check_regular_file(path)
    except OSError as error:
        raise ConfigError(Problem("data.path", None, f": {path} cannot be read: {error.strerror}")) from None
    if path.suffix == ".npy":
        return read_npy_header(path)
    if path.suffix != ".bin":
        rule = 'must end in .bin or .npy for data.kind="tokens"'
        raise ConfigError(Problem("data.path", path, rule, 'use data.kind="text" for text'))
    return read_bin_header(path, token_dtype)
