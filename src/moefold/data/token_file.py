"""Token files (.bin, .npy) read as one stream, and the list of token files recorded when a run begins.

The numbers of the samples follow from the files and their lengths. A checkpoint stores both: if a file breaks later,
only samples with its tokens are skipped, and all others keep their numbers.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, check_regular_file, read_json_object
from moefold.config.data import DataConfig
from moefold.data.input_paths import (
    ENDS_SUFFIX,
    TOKEN_SUFFIXES,
    check_no_duplicates,
    data_file_path,
    data_paths,
    files_below,
    is_below,
)
from moefold.data.sampler import TokenStream
from moefold.data.shard_reader import (
    BrokenShardError,
    DocumentEnds,
    OutOfVocabError,
    ShardReader,
    TokenArraySpec,
    map_npy,
    open_ends_file,
)
from moefold.data.source_listing import named_sources
from moefold.data.tokenizer import NumberTokenizer, Tokenizer
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting, format_list

MEGATRON_SUFFIX = ".idx"
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, number of sequences, number of documents + 1."""
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
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
            ValueError: the documents are not all sequences, or the sequences do not follow each other without a gap.
        """
        offset = _MEGATRON_HEADER.size + 4 * self.num_sequences
        lengths = self._open(_MEGATRON_HEADER.size, self.num_sequences, "<i4")
        offsets = self._open(offset, self.num_sequences)
        documents = self._open(offset + 8 * self.num_sequences, self.num_documents + 1)
        # Document m ends where the first sequence of document m + 1 begins, the last one at the end of the file.
        firsts = documents.read(start, stop + 1).astype(np.int64)
        if (start == 0 and firsts[0]) or not ((firsts >= 0) & (firsts <= self.num_sequences)).all():
            raise ValueError(f"its documents are not the sequences 0 to {self.num_sequences}")
        firsts = firsts[1:]
        inner = firsts[(firsts > 0) & (firsts < self.num_sequences)]
        ends = np.where(firsts == 0, 0, self.num_tokens)
        if len(inner):
            first = int(inner.min()) - 1
            bounds = offsets.read(first, int(inner.max()) + 1).astype(np.int64)
            sizes = lengths.read(first, int(inner.max())).astype(np.int64) * self.dtype.itemsize
            if (bounds[:-1] + sizes != bounds[1:]).any():
                raise ValueError("its sequences do not follow each other in the .bin")
            ends[(firsts > 0) & (firsts < self.num_sequences)] = bounds[inner - first] // self.dtype.itemsize
        return ends

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
    """Read the head of the .idx next to a .bin file; None if there is no such file.

    Raises:
        ConfigError: the file is not an index of Megatron, or belongs to another file.
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
TOKENIZE_INFO_FILE = "tokenize.json"
"""File with which `moefold tokenize` describes an output folder."""
# Bounded, because data sets have up to thousands of shards.
_MAX_OPEN_FILES = 64
_MAX_PROBED_TOKENS = 2**24
_PROBE_TOKENS = 2**14


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file of token ids: path and number of tokens."""

    path: Path
    num_tokens: int
    bin_dtype: np.dtype[np.generic] | None
    """Dtype of the ids of a raw .bin; None for .npy, whose header has it."""
    name: str = ""
    """Name in the recipe; empty: the path is used."""
    offset_bytes: int = 0
    """Bytes of a .bin before its first id."""

    @property
    def display_name(self) -> str:
        """Name in messages."""
        return self.name or str(self.path)

    def open(self) -> ShardReader:
        """Open the file to read ids from it; raise BrokenShardError if the file is missing or has changed."""
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


class TokenFileStream(TokenStream):
    """Several files of ids read as one stream. Every id read is checked against the vocabulary.

    A file can be dropped: its ids keep their positions in the stream, but must not be read.
    """

    def __init__(
        self, files: tuple[TokenFile, ...], *, vocab_size: int, dropped: Iterable[str] = (), is_indexed: bool = False
    ) -> None:
        """Concatenate files, each with at least one token, in their order.

        Args:
            dropped: names of files that are dropped initially.
            is_indexed: whether the run uses the document index next to each file.
        """
        self._files = files
        self._ends = tuple(accumulate(file.num_tokens for file in files))
        self._vocab_size = vocab_size
        self._is_indexed = is_indexed
        self._document_ends = lru_cache(maxsize=_MAX_OPEN_FILES)(lambda index: self._open_document_ends(files[index]))
        self._open = lru_cache(maxsize=_MAX_OPEN_FILES)(lambda index: files[index].open())
        self._dropped: frozenset[int] = frozenset()
        self.drop_files(dropped)

    def __len__(self) -> int:
        return self._ends[-1]

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files by name. Names of other files are ignored."""
        dropped_names = frozenset(names)
        self._dropped |= {index for index, file in enumerate(self._files) if file.name in dropped_names}

    @property
    def dropped_tokens(self) -> list[range]:
        """Token ranges of the dropped files in the stream, ascending."""
        return [range(self._ends[i] - self._files[i].num_tokens, self._ends[i]) for i in sorted(self._dropped)]

    def is_dropped(self, start: int, stop: int) -> bool:
        """Return whether any of the tokens start .. stop-1 belongs to a dropped file."""
        return bool(self._dropped) and any(index in self._dropped for index, _, _ in self._file_segments(start, stop))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop-1, int64 [stop - start], across file boundaries.

        Raises:
            OutOfVocabError: an id is negative or not below the vocabulary. The message has its file and position.
            BrokenShardError: a file has changed.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} .. {stop - 1} are outside [0, {len(self)})")
        tokens = np.empty(stop - start, dtype=np.int64)
        num_read = 0
        for index, offset, length in self._file_segments(start, stop):
            tokens[num_read : num_read + length] = self._read_segment(index, offset, length)
            num_read += length
        return tokens

    def describe_location(self, token: int) -> str:
        """Return file and position of a token and, if documents are indexed, its document number, for a message.

        Raises no exception, because messages of other errors use it.
        """
        index, offset, _ = next(self._file_segments(token, token + 1))
        file = self._files[index]
        location = f"{file.path}, token {offset}"
        if index in self._dropped or not self._is_indexed:
            return location
        try:
            return f"{location}, document {self._document_ends(index).document_of(offset)}"
        except (ConfigError, BrokenShardError):
            return location

    def document_starts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the tokens start .. stop-1 that begin a document, [stop - start].

        Raises:
            ConfigError: a file has no document index next to it.
            BrokenShardError: the index has changed since the run began.
        """
        begins = np.zeros(stop - start, dtype=np.bool_)
        num_read = 0
        for index, offset, length in self._file_segments(start, stop):
            segment = begins[num_read : num_read + length]
            segment[self._document_ends(index).between(offset, offset + length) - offset] = True
            if offset == 0:
                segment[0] = True
            num_read += length
        return begins

    def find_bad_files(self) -> dict[str, BrokenShardError | OutOfVocabError]:
        """Read up to 16 Mi evenly spread tokens, which finds most out-of-vocabulary ids before a run starts.

        Returns:
            The errors by file name; reading of a bad file stops at its first error.
        """
        faults: dict[str, BrokenShardError | OutOfVocabError] = {}
        num_probes = min(_MAX_PROBED_TOKENS // _PROBE_TOKENS, -(-len(self) // _PROBE_TOKENS))
        for i in range(num_probes):
            start = i * len(self) // num_probes
            for index, offset, length in self._file_segments(start, min(start + _PROBE_TOKENS, len(self))):
                name = self._files[index].display_name
                if index in self._dropped or name in faults:
                    continue
                try:
                    self._read_segment(index, offset, length)
                except (BrokenShardError, OutOfVocabError) as error:
                    faults[name] = error
        return faults

    def probe(self) -> None:
        """Raise the first error that `find_bad_files` finds."""
        for fault in self.find_bad_files().values():
            raise fault

    def _file_segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the file segments that contain tokens start .. stop-1: file index, offset in the file and length."""
        index = bisect_right(self._ends, start)
        while start < stop:
            offset = start - (self._ends[index] - self._files[index].num_tokens)
            length = min(stop, self._ends[index]) - start
            yield index, offset, length
            index = index + 1
            start = start + length

    def _read_segment(self, index: int, offset: int, length: int) -> NDArray[np.integer]:
        file = self._files[index]
        assert index not in self._dropped, f"{file.display_name} was dropped, but is read"
        ids = self._open(index).read(offset, offset + length)
        strange = (ids < 0) | (ids >= self._vocab_size)
        if strange.any():
            place = int(np.argmax(strange))
            raise OutOfVocabError(
                f"{file.path} holds id {int(ids[place])} at token {offset + place}, but ids must be at least 0 and "
                f"below model.vocab_size={self._vocab_size}",
                "raise it, or check data.token_dtype and the tokenizer",
                file.name,
            )
        return ids

    def _open_document_ends(self, file: TokenFile) -> DocumentEnds:
        try:
            return open_document_ends(file.path, file.num_tokens, file.name)
        except ConfigError as error:
            if not file.name:
                raise
            # The index was valid when the run began.
            raise file.token_array_spec(0, np.dtype(np.uint8)).broken_error(str(error)) from error


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
    """Return the path of a token file's document index: int64 little-endian, no header; or of Megatron's index."""
    index = path.with_suffix(ENDS_SUFFIX)
    megatron = path.with_suffix(MEGATRON_SUFFIX)
    return megatron if path.suffix == ".bin" and not index.exists() and megatron.exists() else index


def open_document_ends(path: Path, num_tokens: int, name: str = "") -> DocumentEnds:
    """Open the document index next to a token file; raise ConfigError if it is missing, or belongs to another file."""
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
    """Read the header of an .npy file of ids; raise ConfigError if it is not one row of integers."""
    try:
        array = map_npy(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not a complete .npy array ({error}); write it again with numpy.save") from error
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {array.dtype}, but token ids are integers; save it as uint16 or uint32")
    if array.ndim != 1:
        raise ConfigError(f"{path} has shape {list(array.shape)}, but token ids are one row; save array.reshape(-1)")
    return TokenFile(path, len(array), None)


def check_finished(folder: Path) -> None:
    """Raise ConfigError if `moefold tokenize` has not finished the folder."""
    info = read_tokenize_info(folder)
    if info and info.get("is_complete") is not True:
        raise ConfigError(
            f"{Setting('data.path', folder):s} is not finished; run the same `moefold tokenize` command again, which "
            "resumes"
        )


def read_tokenize_info(folder: Path) -> dict[str, Any]:
    """Return the record of `moefold tokenize` on the token files of a folder; empty if it did not make them."""
    try:
        return read_json_object(folder / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / TOKENIZE_INFO_FILE} is broken ({error}); tokenise again into another folder"
        ) from error


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


@dataclass(frozen=True)
class TokenFileSet:
    """Token files by their names in the recipe, in the order of the data, recorded at the start of a run."""

    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in each file, at least one."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Dropped files, each with the reason."""

    def without(self, dropped: Mapping[str, str]) -> Self:
        """Return the files with more of them dropped. Earlier reasons are kept."""
        return replace(self, dropped={**dropped, **self.dropped})

    def files(self, data: DataConfig) -> tuple[TokenFile, ...]:
        """Return the files that data.path names, including dropped files; raise ConfigError if there is none."""
        names = data.paths
        roots = [Path(name) for name in names]
        selected = [name for name in self.num_tokens if any(is_below(Path(name), root) for root in roots)]
        files = tuple(
            _recorded_file(data_file_path(name, names), self.num_tokens[name], data.token_dtype, name)
            for name in selected
        )
        if not files:
            raise ConfigError(
                f"{Setting('data.path', format_list([*names])):s} is empty: no token in its files; name files with "
                "tokens"
            )
        return files


def _recorded_file(path: Path, num_tokens: int, token_dtype: str, name: str) -> TokenFile:
    """Return a file of a run by its name. A missing file is reported when it is read."""
    if path.suffix != ".bin":
        return TokenFile(path, num_tokens, None, name)
    if not path.is_file():
        return TokenFile(path, num_tokens, np.dtype(token_dtype).newbyteorder("<"), name)
    return replace(read_bin_header(path, token_dtype), num_tokens=num_tokens, name=name)


def build_token_file_set(data: DataConfig, *, vocab_size: int, skipped: Set[str] = frozenset()) -> TokenFileSet:
    """Return the token files of a new run; data.corrupt="skip" drops files with out-of-vocabulary ids.

    Args:
        skipped: names of files that cannot be read.

    Raises:
        ConfigError: a file is not a token file, all are empty, or none is valid.
    """
    for name in data.paths:
        check_finished(data_file_path(name, [name]))
    shards = TokenFileSet(_count_tokens(data, skipped))
    files = shards.files(data)
    if data.corrupt == "fatal":
        return shards
    faults = TokenFileStream(files, vocab_size=vocab_size).find_bad_files()
    if len(faults) == len(files):
        # If all files have out-of-vocabulary ids, the vocabulary size is probably wrong.
        reasons = [str(fault) if isinstance(fault, OutOfVocabError) else fault.cause for fault in faults.values()]
        raise ConfigError(Problem("data.path", None, f"holds no valid file: {format_list(reasons)}", "copy them again"))
    return shards.without({name: fault.cause for name, fault in faults.items()})


def check_same_files(token_file_set: TokenFileSet, data: DataConfig, *, skipped: Set[str]) -> None:
    """Check that the token files of a checkpoint equal the recipe's, with the same lengths and order.

    Otherwise the run would read files that the recipe does not name, or renumber its samples: raises ConfigError.

    Args:
        token_file_set: the files in the checkpoint; dropped files are not checked.
        skipped: names of files of data.path that the run never had, or that cannot be read now.
    """
    recorded = {name: count for name, count in token_file_set.num_tokens.items() if name not in token_file_set.dropped}
    current = _count_tokens(data, skipped | token_file_set.dropped.keys())
    faults = [f"{name} is none of {Setting('data.path')}" for name in recorded if name not in current]
    faults += [f"{name} is not in the checkpoint" for name in current if name not in recorded]
    faults += [
        f"{name} holds {current[name]} tokens, and {count} in the checkpoint"
        for name, count in recorded.items()
        if current.get(name, count) != count
    ]
    if not faults and list(recorded) != list(current):
        faults = ["they are in another order"]
    if faults:
        raise ConfigError(
            f"the checkpoint names other token files than the recipe: {format_list(faults)}; its run used other data: "
            "resume from another checkpoint, or start a new run with its weights (checkpoint.init_from)"
        )


def _count_tokens(data: DataConfig, skipped: Set[str]) -> dict[str, int]:
    """Return the number of tokens of each non-empty file of data.path, by name, from the headers."""
    counts = {
        name: read_header(path, data.token_dtype).num_tokens
        for name, path in named_sources(data)
        if name not in skipped and path.suffix in TOKEN_SUFFIXES
    }
    return {name: count for name, count in counts.items() if count}


def compare_tokenizers(files: Sequence[TokenFile], tokenizer: Tokenizer, name: str) -> str:
    """Compare the tokenizers of token files and of a run, by the facts that determine the ids of a text.

    Bare numbers are not compared; `name` is data.tokenizer, for messages.

    Returns:
        A note if the tokenizer of some files is not known; else empty.

    Raises:
        ConfigError: files were made with another tokenizer.
    """
    from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer

    if isinstance(tokenizer, NumberTokenizer):
        return ""
    unknown = []
    for folder in sorted({file.path.parent for file in files}):
        info = read_tokenize_info(folder)
        made_with = str(info.get("tokenizer", "")).split()
        identity = tokenizer.identity.split()
        if not made_with:
            unknown.append(str(folder))
        elif made_with[0] == identity[0]:
            continue
        elif info.get("format") == 1 and made_with[0] != "bytes" and isinstance(tokenizer, JsonTokenizer):
            if made_with[0] != tokenizer.folder.process.sha256:
                unknown.append(str(folder))
        else:
            recorded = str(info.get("tokenizer_name", "")) or "another one"
            rule = f"is not the tokenizer that made the ids of {folder}: `moefold tokenize` had {recorded!r}"
            raise ConfigError(Problem("data.tokenizer", name, rule, f"set {Setting('data.tokenizer')} to that one"))
    if not unknown or name == "bytes":
        return ""
    return (
        f"note: {unknown[0]} does not say which tokenizer made its ids, so {Setting('data.tokenizer', name)} is not "
        "compared with it; `moefold tokenize` records it"
    )
