"""Token ids in files, mapped into memory: a run touches only the pages that its samples lie on."""

import json
import os
from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moefold.config.schema import DataConfig
from moefold.data.npy_file import map_npy
from moefold.data.path import data_paths, files_below, refuse_repeats
from moefold.errors import ConfigError

SUFFIXES = (".bin", ".npy")
NOTE = "tokenize.json"
"""What `moefold tokenize` says of a folder of tokens."""
# A mapping holds a file descriptor, and data sets of thousands of shards exist.
_MAX_MAPPED_FILES = 64
_PROBED_TOKENS = 2**24
_PROBE_TOKENS = 2**14


@dataclass(frozen=True, slots=True)
class TokenFile:
    """One file of ids: its place and how many it holds."""

    path: Path
    num_tokens: int
    bin_dtype: np.dtype[np.generic] | None
    """Type of the ids of a bare .bin; None for .npy, which says so itself."""

    def map(self) -> NDArray[np.integer]:
        """Map the file read-only, [num_tokens]."""
        if self.bin_dtype is not None:
            mapped: NDArray[np.integer] = np.memmap(self.path, dtype=self.bin_dtype, mode="r", shape=(self.num_tokens,))
            return mapped
        return map_npy(self.path)


class TokenFiles:
    """Several files of ids read as one row; every id read is checked against the vocabulary."""

    def __init__(self, files: tuple[TokenFile, ...], *, vocab_size: int) -> None:
        """Join files in their order.

        Args:
            files: files of at least one token each.
            vocab_size: rows of the model's embedding; ids must be below.
        """
        self._files = files
        self._ends = tuple(accumulate(file.num_tokens for file in files))
        self._vocab_size = vocab_size
        self._document_ends = lru_cache(maxsize=_MAX_MAPPED_FILES)(
            lambda which: map_document_ends(files[which].path, files[which].num_tokens)
        )
        self._map = lru_cache(maxsize=_MAX_MAPPED_FILES)(lambda which: files[which].map())

    def __len__(self) -> int:
        """Tokens of all files."""
        return self._ends[-1]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop-1, int64 [stop - start], across the borders of files.

        Raises:
            ConfigError: an id is negative or not below the vocabulary; its file and place are named.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} .. {stop - 1} are outside [0, {len(self)})")
        tokens = np.empty(stop - start, dtype=np.int64)
        which, done = bisect_right(self._ends, start), 0
        while done < len(tokens):
            offset = start + done - (self._ends[which] - self._files[which].num_tokens)
            part = self._map(which)[offset : offset + len(tokens) - done]
            self._refuse_strange_ids(part, self._files[which].path, offset)
            tokens[done : done + len(part)] = part
            which, done = which + 1, done + len(part)
        return tokens

    def place(self, token: int) -> str:
        """File, place in it and, where documents are indexed, the number of the document of a token, for a message."""
        which = bisect_right(self._ends, token)
        file = self._files[which]
        offset = token - (self._ends[which] - file.num_tokens)
        words = f"{file.path}, token {offset}"
        if not document_ends_path(file.path).exists():
            return words
        return f"{words}, document {int(np.searchsorted(self._document_ends(which), offset, side='right'))}"

    def begins(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens start .. stop-1 is the first of a document, [stop - start].

        Raises:
            ConfigError: a file has no index of its documents beside it.
        """
        begins = np.zeros(stop - start, dtype=np.bool_)
        which, done = bisect_right(self._ends, start), 0
        while done < len(begins):
            first = self._ends[which] - self._files[which].num_tokens
            offset = start + done - first
            length = min(len(begins) - done, self._files[which].num_tokens - offset)
            begins[done : done + length] = self._begins_in_file(which, offset, offset + length)
            which, done = which + 1, done + length
        return begins

    def _begins_in_file(self, which: int, start: int, stop: int) -> NDArray[np.bool_]:
        begins = np.zeros(stop - start, dtype=np.bool_)
        ends = self._document_ends(which)
        within = ends[np.searchsorted(ends, start) : np.searchsorted(ends, stop)]
        begins[within - start] = True
        if start == 0:
            begins[0] = True
        return begins

    def probe(self) -> None:
        """Read up to 16 Mi tokens, spread evenly, so that most strange ids are found before a run starts.

        Raises:
            ConfigError: an id is negative or not below the vocabulary.
        """
        num_probes = min(_PROBED_TOKENS // _PROBE_TOKENS, -(-len(self) // _PROBE_TOKENS))
        for i in range(num_probes):
            start = i * len(self) // num_probes
            self.read(start, min(start + _PROBE_TOKENS, len(self)))

    def _refuse_strange_ids(self, part: NDArray[np.integer], path: Path, offset: int) -> None:
        strange = (part < 0) | (part >= self._vocab_size)
        if strange.any():
            place = int(np.argmax(strange))
            raise ConfigError(
                f"{path} holds id {int(part[place])} at token {offset + place}, but ids must be at least 0 and below "
                f"model.vocab_size={self._vocab_size}; raise it, or check data.token_dtype and the tokenizer"
            )


def token_files(data: DataConfig, skipped: Set[Path] = frozenset()) -> tuple[TokenFile, ...]:
    """The .bin and .npy files that data.path names, folders recursively, but those that are skipped.

    Reads headers and sizes only.

    Files without a token are left out where others have some.

    Raises:
        ConfigError: a path is missing, named twice, or not of these two forms; all are empty.
    """
    roots = data_paths(data.path, "tokens")
    for root in roots:
        _refuse_unfinished(root)
    paths = tuple(file for root in roots for file in files_below(root) if not root.is_dir() or file.suffix in SUFFIXES)
    if not paths:
        raise ConfigError(f"data.path={roots[0]} holds no .bin or .npy file; name token files or a folder with some")
    refuse_repeats(tuple(path.resolve() for path in paths))
    sound = (path for path in paths if path not in skipped)
    files = tuple(file for file in (look_at(path, data.token_dtype) for path in sound) if file.num_tokens)
    if not files:
        raise ConfigError(f"data.path={roots[0]} is empty: no token in {len(paths)} file(s); name files with tokens")
    return files


def document_ends_path(path: Path) -> Path:
    """Where the index of a token file's documents stands, if it has one: int64 little-endian, no header."""
    return path.with_suffix(".ends")


def map_document_ends(path: Path, num_tokens: int) -> NDArray[np.int64]:
    """The index beside a token file: one past the last token of each document, ascending, [documents].

    Raises:
        ConfigError: there is none, it is broken, or it is of another file than one of so many tokens.
    """
    index = document_ends_path(path)
    try:
        ends: NDArray[np.int64] = np.memmap(index, dtype=np.dtype("<i8"), mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.document_index=true needs an index of documents beside {path}, and {index.name} is none ({error}); "
            "tokenise with `moefold tokenize`, or set data.document_end to the token that ends documents"
        ) from error
    if ends[-1] != num_tokens or ends[0] < 0 or (np.diff(ends) < 0).any():
        raise ConfigError(
            f"{index} is no index of the {num_tokens} tokens of {path.name}, at which it has to end, ascending; "
            "tokenise anew"
        )
    return ends


def look_at_npy(path: Path) -> TokenFile:
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


def _refuse_unfinished(folder: Path) -> None:
    """Raise ConfigError if `moefold tokenize` has not finished the folder."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / NOTE} is broken ({error}); tokenise anew into another folder") from error
    if not isinstance(note, dict):
        raise ConfigError(f"{folder / NOTE} is broken (it holds no object); tokenise anew into another folder")
    if note.get("is_complete") is not True:
        raise ConfigError(
            f"data.path={folder} is not finished; give the same `moefold tokenize` command again, which goes on"
        )


def look_at(path: Path, token_dtype: str) -> TokenFile:
    """Look at a file of ids; reads its header and its size only.

    Raises:
        ConfigError: it is neither a .bin of whole ids nor a complete .npy.
    """
    if not os.access(path, os.R_OK):
        raise ConfigError(f"data.path: {path} is not readable; give read access or leave it out")
    if path.suffix == ".npy":
        return look_at_npy(path)
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
