"""Token ids in files: a run reads only what its samples lie on."""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.checkpoint.data_files import ENDS_SUFFIX
from moefold.config.schema import DataConfig
from moefold.data.npy_file import map_npy
from moefold.data.path import check_no_duplicates, data_paths, files_below
from moefold.data.shard_reader import BrokenShardError, DocumentEnds, OutOfVocabError, ShardReader, TokenArraySpec
from moefold.errors import ConfigError

SUFFIXES = (".bin", ".npy")
TOKENIZE_INFO_FILE = "tokenize.json"
"""What `moefold tokenize` says of a folder of tokens."""
# Data sets of thousands of shards exist.
_MAX_OPEN_FILES = 64
_MAX_PROBED_TOKENS = 2**24
_PROBE_TOKENS = 2**14


@dataclass(frozen=True, slots=True)
class TokenFile:
    """One file of ids: its place and how many it holds."""

    path: Path
    num_tokens: int
    bin_dtype: np.dtype[np.generic] | None
    """Type of the ids of a bare .bin; None for .npy, which says so itself."""
    name: str = ""
    """Its name in the recipe; empty stands for the path."""

    @property
    def display_name(self) -> str:
        """What messages call it."""
        return self.name or str(self.path)

    def open(self) -> ShardReader:
        """Open the file to read ids from it.

        Raises:
            BrokenShardError: it is not there, or not what it was.
        """
        if self.bin_dtype is not None:
            return ShardReader(self.token_array_spec(0, self.bin_dtype))
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
        """Where the ids lie, and of what type they are."""
        return TokenArraySpec(self.path, self.display_name, offset_bytes, dtype, self.num_tokens, self.name)


class TokenFileStream:
    """Several files of ids read as one row; every id read is checked against the vocabulary.

    A file can be given up: its ids keep their places in the row, and nobody may ask for them.
    """

    def __init__(
        self, files: tuple[TokenFile, ...], *, vocab_size: int, dropped: Iterable[str] = (), is_indexed: bool = False
    ) -> None:
        """Join files in their order.

        Args:
            files: files of at least one token each.
            vocab_size: rows of the model's embedding; ids must be below.
            dropped: as of `drop_files`.
            is_indexed: the run reads the index of documents beside each; what else lies there is not looked at.
        """
        self._files = files
        self._ends = tuple(accumulate(file.num_tokens for file in files))
        self._vocab_size = vocab_size
        self._is_indexed = is_indexed
        self._document_ends = lru_cache(maxsize=_MAX_OPEN_FILES)(lambda which: self._open_document_ends(files[which]))
        self._open = lru_cache(maxsize=_MAX_OPEN_FILES)(lambda which: files[which].open())
        self._dropped: frozenset[int] = frozenset()
        self.drop_files(dropped)

    def __len__(self) -> int:
        """Tokens of all files."""
        return self._ends[-1]

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files; names are those of the files, others are passed over."""
        wanted = frozenset(names)
        self._dropped |= {which for which, file in enumerate(self._files) if file.name in wanted}

    @property
    def dropped_tokens(self) -> list[range]:
        """The places in the row of the files that were given up, ascending."""
        return [range(self._ends[i] - self._files[i].num_tokens, self._ends[i]) for i in sorted(self._dropped)]

    def is_dropped(self, start: int, stop: int) -> bool:
        """Whether any of the tokens start .. stop-1 is of a file that was given up."""
        return bool(self._dropped) and any(which in self._dropped for which, _, _ in self._file_segments(start, stop))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop-1, int64 [stop - start], across the borders of files.

        Raises:
            StrangeIdError: an id is negative or not below the vocabulary; its file and place are named.
            BrokenShardError: a file is not what it was.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} .. {stop - 1} are outside [0, {len(self)})")
        tokens = np.empty(stop - start, dtype=np.int64)
        done = 0
        for which, offset, length in self._file_segments(start, stop):
            tokens[done : done + length] = self._read_segment(which, offset, length)
            done += length
        return tokens

    def describe_location(self, token: int) -> str:
        """File, place in it and, where documents are indexed, the number of the document of a token, for a message.

        It never raises: a message of another fault is what it is for.
        """
        which, offset, _ = next(self._file_segments(token, token + 1))
        file = self._files[which]
        words = f"{file.path}, token {offset}"
        if which in self._dropped or not self._is_indexed:
            return words
        try:
            return f"{words}, document {self._document_ends(which).document_of(offset)}"
        except (ConfigError, BrokenShardError):
            return words

    def document_starts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens start .. stop-1 is the first of a document, [stop - start].

        Raises:
            ConfigError: a file has no index of its documents beside it.
            BrokenShardError: it had one, and that is not what it was.
        """
        begins = np.zeros(stop - start, dtype=np.bool_)
        done = 0
        for which, offset, length in self._file_segments(start, stop):
            part = begins[done : done + length]
            part[self._document_ends(which).between(offset, offset + length) - offset] = True
            if offset == 0:
                part[0] = True
            done += length
        return begins

    def find_bad_files(self) -> dict[str, BrokenShardError | OutOfVocabError]:
        """Read up to 16 Mi tokens, spread evenly, so that most strange ids are found before a run starts.

        Returns:
            What is wrong with files that are, by their names; each is read no further then.
        """
        found: dict[str, BrokenShardError | OutOfVocabError] = {}
        num_probes = min(_MAX_PROBED_TOKENS // _PROBE_TOKENS, -(-len(self) // _PROBE_TOKENS))
        for i in range(num_probes):
            start = i * len(self) // num_probes
            for which, offset, length in self._file_segments(start, min(start + _PROBE_TOKENS, len(self))):
                name = self._files[which].display_name
                if which in self._dropped or name in found:
                    continue
                try:
                    self._read_segment(which, offset, length)
                except (BrokenShardError, OutOfVocabError) as error:
                    found[name] = error
        return found

    def probe(self) -> None:
        """Refuse what `find_bad_files` finds.

        Raises:
            StrangeIdError: an id is negative or not below the vocabulary.
            BrokenShardError: a file cannot be read.
        """
        for fault in self.find_bad_files().values():
            raise fault

    def _file_segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of files that tokens start .. stop-1 lie in: which file, place in it and length."""
        which = bisect_right(self._ends, start)
        while start < stop:
            offset = start - (self._ends[which] - self._files[which].num_tokens)
            length = min(stop, self._ends[which]) - start
            yield which, offset, length
            which, start = which + 1, start + length

    def _read_segment(self, which: int, offset: int, length: int) -> NDArray[np.integer]:
        file = self._files[which]
        assert which not in self._dropped, f"{file.display_name} was given up, and is read"
        part = self._open(which).read(offset, offset + length)
        strange = (part < 0) | (part >= self._vocab_size)
        if strange.any():
            place = int(np.argmax(strange))
            raise OutOfVocabError(
                f"{file.path} holds id {int(part[place])} at token {offset + place}, but ids must be at least 0 and "
                f"below model.vocab_size={self._vocab_size}",
                "raise it, or check data.token_dtype and the tokenizer",
                file.name,
            )
        return part

    def _open_document_ends(self, file: TokenFile) -> DocumentEnds:
        try:
            return open_document_ends(file.path, file.num_tokens, file.name)
        except ConfigError as error:
            if not file.name:
                raise
            # The index was sound when the run looked at its files.
            raise file.token_array_spec(0, np.dtype(np.uint8)).broken_error(str(error)) from error


def token_files(data: DataConfig, skipped: Set[Path] = frozenset()) -> tuple[TokenFile, ...]:
    """The .bin and .npy files that data.path names, folders recursively, but those that are skipped.

    Reads headers and sizes only.

    Files without a token are left out where others have some.

    Raises:
        ConfigError: a path is missing, named twice, or not of these two forms; all are empty.
    """
    names = (data.path,) if isinstance(data.path, str) else data.path
    roots = data_paths(tuple(name for name in names if Path(name).expanduser().absolute() not in skipped), "tokens")
    for root in roots:
        check_finished(root)
    paths = tuple(file for root in roots for file in files_below(root) if not root.is_dir() or file.suffix in SUFFIXES)
    if not paths:
        raise ConfigError(f"data.path={roots[0]} holds no .bin or .npy file; name token files or a folder with some")
    check_no_duplicates(tuple(path.resolve() for path in paths))
    sound = (path for path in paths if path not in skipped)
    files = tuple(file for file in (read_header(path, data.token_dtype) for path in sound) if file.num_tokens)
    if not files:
        raise ConfigError(f"data.path={roots[0]} is empty: no token in {len(paths)} file(s); name files with tokens")
    return files


def document_ends_path(path: Path) -> Path:
    """Where the index of a token file's documents stands, if it has one: int64 little-endian, no header."""
    return path.with_suffix(ENDS_SUFFIX)


def open_document_ends(path: Path, num_tokens: int, name: str = "") -> DocumentEnds:
    """The index beside a token file of so many tokens, read through once.

    Raises:
        ConfigError: there is none, it is broken, or it is of another file than one of so many tokens.
        BrokenShardError: it cannot be read to its end.
    """
    index = document_ends_path(path)
    try:
        return DocumentEnds(index, num_tokens, shard=name)
    except OSError as error:
        raise ConfigError(
            f"data.document_index=true needs an index of documents beside {path}, and {index.name} is none ({error}); "
            "tokenise with `moefold tokenize`, or set data.document_end to the token that ends documents"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{index} is no index of the {num_tokens} tokens of {path.name}, at which it has to end, ascending "
            f"({error}); tokenise anew"
        ) from error


def read_npy_header(path: Path) -> TokenFile:
    """Look at an .npy file of ids; reads its header only.

    Raises:
        ConfigError: it is not a complete one-dimensional .npy array of integers.
    """
    try:
        array = map_npy(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not a complete .npy array ({error}); write it anew with numpy.save") from error
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {array.dtype}, but token ids are integers; save it as uint16 or uint32")
    if array.ndim != 1:
        raise ConfigError(f"{path} has shape {list(array.shape)}, but token ids are one row; save array.reshape(-1)")
    return TokenFile(path, len(array), None)


def check_finished(folder: Path) -> None:
    """Raise ConfigError if `moefold tokenize` has not finished the folder."""
    try:
        note = read_json(folder / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / TOKENIZE_INFO_FILE} is broken ({error}); tokenise anew into another folder"
        ) from error
    if not isinstance(note, dict):
        raise ConfigError(
            f"{folder / TOKENIZE_INFO_FILE} is broken (it holds no object); tokenise anew into another folder"
        )
    if note.get("is_complete") is not True:
        raise ConfigError(
            f"data.path={folder} is not finished; give the same `moefold tokenize` command again, which goes on"
        )


def read_header(path: Path, token_dtype: str) -> TokenFile:
    """Look at a file of ids; reads its header and its size only.

    Raises:
        ConfigError: it is neither a .bin of whole ids nor a complete .npy.
    """
    if not os.access(path, os.R_OK):
        raise ConfigError(f"data.path: {path} is not readable; give read access or leave it out")
    if path.suffix == ".npy":
        return read_npy_header(path)
    if path.suffix != ".bin":
        raise ConfigError(
            f'data.path={path} must end in .bin or .npy for data.kind="tokens"; use data.kind="text" for text'
        )
    dtype = np.dtype(token_dtype).newbyteorder("<")
    size_bytes = path.stat().st_size
    if size_bytes % dtype.itemsize:
        raise ConfigError(
            f"{path} has {size_bytes} bytes, which is no multiple of the {dtype.itemsize} bytes of "
            f"data.token_dtype={token_dtype}; set the type it was written with, or copy the file anew"
        )
    return TokenFile(path, size_bytes // dtype.itemsize, dtype)
