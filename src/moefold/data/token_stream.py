"""Long sequences of token ids, read in parts: the base class, and token files read as one stream."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from moefold.data.shard_reader import BrokenShardError, DocumentEnds, OutOfVocabError
from moefold.data.token_file import TokenFile, open_document_ends
from moefold.errors import ConfigError


class TokenStream(ABC):
    """Long sequence of token ids, read in parts. It may come from files, and have an index of documents."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop-1, [stop - start]."""

    def document_starts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the tokens start .. stop-1 that begin a document, [stop - start]. This needs an index."""
        raise NotImplementedError

    def describe_location(self, token: int) -> str:
        """Return the file and position of a token, for a message, or "" if it is not from a file."""
        return ""

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files by name. The positions of all ids stay the same."""
        return

    @property
    def dropped_tokens(self) -> list[range]:
        """Token ranges of the dropped files, ascending."""
        return []

    def is_dropped(self, start: int, stop: int) -> bool:
        """Return whether any of the tokens start .. stop-1 belongs to a dropped file."""
        return False


# Bounded, because data sets have up to thousands of shards.
_MAX_OPEN_FILES = 64
_MAX_PROBED_TOKENS = 2**24
_PROBE_TOKENS = 2**14


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
            The errors by file name. Reading of a bad file stops at its first error.
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
