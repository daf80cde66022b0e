"""Read parts of token files with `pread`, so that a truncated or deleted file raises an error that names it.

With memory mapping, a missing page kills the process by SIGBUS, which names no file and cannot be handled.
"""

import os
import tokenize
import zipfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import check_regular_file
from moefold.errors import ConfigError, RunError
from moefold.message_text import first_line

_ENDS_DTYPE = np.dtype("<i8")
_BLOCK_ENDS = 512
"""Document ends in a block of 4 KiB. The last end of each block is kept in memory."""
_CHECKED_BLOCKS = 2048


class DataFileError(Exception):
    """A defect of a data file. The cause and the remedy are separate attributes."""

    def __init__(self, cause: str, remedy: str, shard: str = "", seen_at: str = "") -> None:
        """Store the parts of the message.

        Args:
            cause: the defect, with the file.
            remedy: advice if the file is not skipped.
            shard: name of the file in the recipe, or "" if it has no name there.
            seen_at: the rank and step that found it, or "" before ranks read.
        """
        super().__init__(cause, remedy, shard, seen_at)
        self.cause = cause
        self.remedy = remedy
        self.shard = shard
        self.seen_at = seen_at

    def __str__(self) -> str:
        place = f"{self.seen_at}: " if self.seen_at else ""
        return f"{place}{self.cause}; {self.remedy}"

    def with_reporter(self, seen_at: str) -> Self:
        """Return the same error with the rank that found it."""
        return type(self)(self.cause, self.remedy, self.shard, seen_at)


class BrokenShardError(DataFileError, RunError):
    """A data file changed, broke or disappeared after the run first read it."""


class OutOfVocabError(DataFileError, ConfigError):
    """A data file has an id outside the model's vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenArraySpec:
    """Location and dtype of the ids in a file."""

    path: Path
    name: str
    """Name in messages."""
    offset_bytes: int
    dtype: np.dtype[np.generic]
    count: int
    shard: str = ""
    """The data file to skip if these ids are unreadable, by its name in the recipe, or "" if it cannot be skipped."""

    def broken_error(self, reason: str) -> BrokenShardError:
        """Return the error for a file that broke during the run."""
        skip = 'set data.corrupt="skip" to continue without it'
        way_out = skip if self.shard else "create it again (if it is in the token cache, remove it)"
        cause = f"data file {self.name} broke while the run read it: {reason}"
        return BrokenShardError(cause, f"restore it as it was, or {way_out}", self.shard)


class ShardReader:
    """Reader of an open file of numbers, which is closed when the reader is garbage-collected."""

    _handle = -1

    def __init__(self, ids: TokenArraySpec) -> None:
        """Open the file. Raises BrokenShardError if it cannot be opened, or is shorter than before."""
        self._ids = ids
        try:
            self._handle = os.open(ids.path, os.O_RDONLY | os.O_CLOEXEC)
            size_bytes = os.fstat(self._handle).st_size
        except OSError as error:
            raise ids.broken_error(f"it cannot be opened ({error.strerror})") from error
        self._check_length(size_bytes)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def __len__(self) -> int:
        return self._ids.count

    def __getitem__(self, rows: slice) -> NDArray[np.integer]:
        """Return the ids of a slice without a step, as for an array. Errors are as for `read`."""
        start, stop, step = rows.indices(len(self))
        assert step == 1
        return self.read(start, max(start, stop))

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Return ids start .. stop-1, which must be in the file, [stop - start], read-only."""
        ids = self._ids
        size_bytes = (stop - start) * ids.dtype.itemsize
        try:
            content = os.pread(self._handle, size_bytes, ids.offset_bytes + start * ids.dtype.itemsize)
            if len(content) < size_bytes:
                self._check_length(os.fstat(self._handle).st_size)
                raise ids.broken_error(f"{len(content)} of {size_bytes} bytes at {start} were read")
        except OSError as error:
            raise ids.broken_error(f"it cannot be read ({error.strerror})") from error
        return np.frombuffer(content, dtype=ids.dtype)

    def _check_length(self, size_bytes: int) -> None:
        needed_bytes = self._ids.offset_bytes + self._ids.count * self._ids.dtype.itemsize
        if size_bytes < needed_bytes:
            raise self._ids.broken_error(f"it has {size_bytes} of {needed_bytes} bytes")


class EndsReader(Protocol):
    """Reader of the ends of documents."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Return the ends of the documents start .. stop-1."""
        ...


def open_ends_file(index: Path, *, shard: str) -> ShardReader:
    """Open an index file of int64. Raises ValueError if an index cannot have its size."""
    size_bytes = index.stat().st_size
    if size_bytes == 0 or size_bytes % _ENDS_DTYPE.itemsize:
        raise ValueError(f"it has {size_bytes} bytes, which is not a positive multiple of 8")
    count = size_bytes // _ENDS_DTYPE.itemsize
    return ShardReader(TokenArraySpec(index, str(index), 0, _ENDS_DTYPE, count, shard))


class DocumentEnds:
    """Document index of a token file: the position after the last token of each document, ascending.

    The index is read from disk on demand. One number in 512 is kept in memory.
    """

    def __init__(self, index: "EndsReader", num_tokens: int) -> None:
        """Raise ValueError with the reason if an index does not belong to a file with `num_tokens` tokens."""
        self._count = len(index)
        self._reader = index
        self._last_of_block = self._check(num_tokens)

    def __len__(self) -> int:
        return self._count

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ends from `start` to `stop` - 1, ascending."""
        first = self._find_block(start - 1)
        last = self._find_block(stop - 1)
        ends = self._read(first, last + 1)
        return ends[np.searchsorted(ends, start) : np.searchsorted(ends, stop)]

    def document_of(self, token: int) -> int:
        """Return the number of a token's document: the number of documents that end at or before the token."""
        block = self._find_block(token)
        return block * _BLOCK_ENDS + int(np.searchsorted(self._read(block, block + 1), token, side="right"))

    def _find_block(self, token: int) -> int:
        """Return the first block with an end after `token`, or the last block."""
        return min(bisect_right(self._last_of_block, token), len(self._last_of_block) - 1)

    def _read(self, first_block: int, end_block: int) -> NDArray[np.int64]:
        stop = min(end_block * _BLOCK_ENDS, self._count)
        return self._reader.read(first_block * _BLOCK_ENDS, stop).astype(np.int64, copy=False)

    def _check(self, num_tokens: int) -> NDArray[np.int64]:
        """Read the whole index, some blocks at a time, and return the last end of each block."""
        num_blocks = -(-self._count // _BLOCK_ENDS)
        last_of_block = np.empty(num_blocks, dtype=np.int64)
        before = 0
        for block in range(0, num_blocks, _CHECKED_BLOCKS):
            ends = self._read(block, block + _CHECKED_BLOCKS)
            if ends[0] < before or (np.diff(ends) < 0).any():
                raise ValueError("it does not ascend")
            before = int(ends[-1])
            places = np.append(np.arange(_BLOCK_ENDS - 1, len(ends), _BLOCK_ENDS), len(ends) - 1)
            last_of_block[block : block + _CHECKED_BLOCKS] = ends[np.unique(places)]
        if before != num_tokens:
            raise ValueError(f"it ends at {before}, not at {num_tokens}")
        return last_of_block


_INVALID_FILE_ERRORS = (
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
)
"""Exceptions that numpy raises on invalid files: Python's own tokenizer reads the header."""


def map_npy(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    """Memory-map an array read-only. Only its header is read.

    Raises:
        ValueError: the file cannot be read, is not a complete array of plain numbers, or has several arrays.
    """
    try:
        check_regular_file(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except _INVALID_FILE_ERRORS as error:
        raise ValueError(first_line(error)) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive of arrays, not one array")
    return array
