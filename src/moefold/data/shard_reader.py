"""Parts of token files, read by system calls: a file that is cut or gone while a run reads it is an error with a name.

A page of a mapped file that is no longer there ends the process by SIGBUS, which names nothing and can be answered by
nobody; a read that comes short can.
"""

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moefold.errors import ConfigError, RunError

_ENDS_DTYPE = np.dtype("<i8")
_BLOCK_ENDS = 512
"""Ends of documents in a block of 4 KiB; the last one of each block is kept in memory."""
_CHECKED_BLOCKS = 2048


class DataFileError(Exception):
    """Something is wrong with a data file. What it is and what a user can do about it are told apart."""

    def __init__(self, cause: str, remedy: str, shard: str = "", seen_at: str = "") -> None:
        """Keep the parts.

        Args:
            cause: what is wrong with which file.
            remedy: what to do where the file is not left out.
            shard: its name in the recipe; empty if it has none there.
            seen_at: which rank found it, and when; empty before ranks read.
        """
        super().__init__(cause, remedy, shard, seen_at)
        self.cause, self.remedy, self.shard, self.seen_at = cause, remedy, shard, seen_at

    def __str__(self) -> str:
        """The message where it ends a run."""
        where = f"{self.seen_at}: " if self.seen_at else ""
        return f"{where}{self.cause}; {self.remedy}"

    def with_reporter(self, seen_at: str) -> Self:
        """The same, with the rank that found it."""
        return type(self)(self.cause, self.remedy, self.shard, seen_at)


class BrokenShardError(DataFileError, RunError):
    """A data file is not what it was when the run looked at it."""


class OutOfVocabError(DataFileError, ConfigError):
    """A data file holds an id that the model has no row for."""


@dataclass(frozen=True, slots=True)
class TokenArraySpec:
    """Where the ids lie in a file."""

    path: Path
    name: str
    """What messages call it."""
    offset_bytes: int
    dtype: np.dtype[np.generic]
    count: int
    shard: str = ""
    """The data file that is of no use without these, by its name in the recipe; empty if it cannot be left out."""

    def broken_error(self, reason: str) -> BrokenShardError:
        """The error that says what became of the file."""
        skip = 'set data.corrupt="skip" to go on without it'
        way_out = skip if self.shard else "make it anew (what lies in the token cache: remove it)"
        cause = f"data file {self.name} broke while the run read it: {reason}"
        return BrokenShardError(cause, f"bring it back as it was, or {way_out}", self.shard)


class ShardReader:
    """An open file of numbers; closed once nobody holds the reader."""

    _handle = -1

    def __init__(self, ids: TokenArraySpec) -> None:
        """Open the file.

        Raises:
            BrokenShardError: it cannot be opened, or is shorter than it was.
        """
        self._ids = ids
        try:
            self._handle = os.open(ids.path, os.O_RDONLY | os.O_CLOEXEC)
            size_bytes = os.fstat(self._handle).st_size
        except OSError as error:
            raise ids.broken_error(f"it cannot be opened ({error.strerror})") from error
        self._check_length(size_bytes)

    def __del__(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)

    def __len__(self) -> int:
        """Numbers in all."""
        return self._ids.count

    def __getitem__(self, part: slice) -> NDArray[np.integer]:
        """What a slice without a step selects, as of an array; errors are those of `read`."""
        start, stop, step = part.indices(len(self))
        assert step == 1
        return self.read(start, max(start, stop))

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Numbers start .. stop-1, which are within the file, [stop - start]; read-only.

        Raises:
            BrokenShardError: the disk does not give them, or the file ends before.
        """
        ids = self._ids
        size_bytes = (stop - start) * ids.dtype.itemsize
        try:
            found = os.pread(self._handle, size_bytes, ids.offset_bytes + start * ids.dtype.itemsize)
            if len(found) < size_bytes:
                self._check_length(os.fstat(self._handle).st_size)
                raise ids.broken_error(f"{len(found)} of {size_bytes} bytes at {start} were read")
        except OSError as error:
            raise ids.broken_error(f"it cannot be read ({error.strerror})") from error
        numbers: NDArray[np.integer] = np.frombuffer(found, dtype=ids.dtype)
        return numbers

    def _check_length(self, size_bytes: int) -> None:
        needed_bytes = self._ids.offset_bytes + self._ids.count * self._ids.dtype.itemsize
        if size_bytes < needed_bytes:
            raise self._ids.broken_error(f"it has {size_bytes} of {needed_bytes} bytes")


class DocumentEnds:
    """The index beside a token file: one past the last token of each document, ascending.

    It is read from the disk when asked; one number in 512 is kept in memory.
    """

    def __init__(self, index: Path, num_tokens: int, *, shard: str) -> None:
        """Open an index and see that it is one of so many tokens.

        Args:
            index: its file.
            num_tokens: tokens of the file that it is of.
            shard: as of `TokenArraySpec`.

        Raises:
            ValueError: it is not; the text says how.
            BrokenShardError: it cannot be read.
        """
        size_bytes = index.stat().st_size
        if size_bytes == 0 or size_bytes % _ENDS_DTYPE.itemsize:
            raise ValueError(f"it has {size_bytes} bytes, no whole number of them or none")
        self._count = size_bytes // _ENDS_DTYPE.itemsize
        self._reader = ShardReader(TokenArraySpec(index, str(index), 0, _ENDS_DTYPE, self._count, shard))
        self._last_of_block = self._check(num_tokens)

    def __len__(self) -> int:
        """Documents in all."""
        return self._count

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ends from `start` to `stop` - 1, ascending.

        Raises:
            BrokenShardError: the index cannot be read any more.
        """
        first, last = self._find_block(start - 1), self._find_block(stop - 1)
        ends = self._read(first, last + 1)
        return ends[np.searchsorted(ends, start) : np.searchsorted(ends, stop)]

    def document_of(self, token: int) -> int:
        """The number of the document that a token is of: how many end at or before it.

        Raises:
            BrokenShardError: the index cannot be read any more.
        """
        block = self._find_block(token)
        return block * _BLOCK_ENDS + int(np.searchsorted(self._read(block, block + 1), token, side="right"))

    def _find_block(self, token: int) -> int:
        """The first block with an end behind `token`, or the last one."""
        return min(bisect_right(self._last_of_block, token), len(self._last_of_block) - 1)

    def _read(self, first_block: int, end_block: int) -> NDArray[np.int64]:
        stop = min(end_block * _BLOCK_ENDS, self._count)
        return self._reader.read(first_block * _BLOCK_ENDS, stop).astype(np.int64, copy=False)

    def _check(self, num_tokens: int) -> NDArray[np.int64]:
        """Read it all, some blocks at a time; returns the last end of each block."""
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
