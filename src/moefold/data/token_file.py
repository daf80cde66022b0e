"""Token ids in files: a run reads only what its samples lie on.

The token files of a run as they were when it began, so that its samples keep their numbers when a file breaks.

Which sample has which number follows from the files and their lengths. A checkpoint holds both, and from then on a file
that is lost leaves a gap: samples with a token of it are left out, all others stay what they were.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.config.schema import DataConfig
from moefold.data.data_files import ENDS_SUFFIX, is_below
from moefold.data.file_formats import map_npy
from moefold.data.input_paths import check_no_duplicates, data_paths, files_below
from moefold.data.shard_reader import BrokenShardError, DocumentEnds, OutOfVocabError, ShardReader, TokenArraySpec
from moefold.data.source_listing import TOKEN_SUFFIXES, named_sources
from moefold.errors import ConfigError, format_list

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


@dataclass(frozen=True)
class TokenFileSet:
    """Token files by their names in the recipe, in the order of the data."""

    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """How many tokens each holds, at least one."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Those that are left out, each with the reason."""

    def without(self, dropped: Mapping[str, str]) -> Self:
        """The same files, of which more are left out; a reason that was given stays."""
        return replace(self, dropped={**dropped, **self.dropped})

    def files(self, data: DataConfig) -> tuple[TokenFile, ...]:
        """The files that data.path stands for, those included that are left out.

        Raises:
            ConfigError: there is none, or a path is named twice.
        """
        names = (data.path,) if isinstance(data.path, str) else data.path
        roots = [Path(name) for name in names]
        mine = [name for name in self.num_tokens if any(is_below(Path(name), root) for root in roots)]
        dtype = np.dtype(data.token_dtype).newbyteorder("<")
        files = tuple(
            TokenFile(path, self.num_tokens[name], dtype if path.suffix == ".bin" else None, name)
            for name, path in ((name, Path(name).expanduser().absolute()) for name in mine)
        )
        if not files:
            raise ConfigError(
                f"data.path={format_list([*names])} is empty: no token in its files; name files with tokens"
            )
        return files


def build_token_file_set(data: DataConfig, *, vocab_size: int, skipped: Set[str] = frozenset()) -> TokenFileSet:
    """The token files of a run that begins; under data.corrupt="skip" those with strange ids are left out.

    Args:
        data: the recipe's section, of kind "tokens".
        vocab_size: model.vocab_size.
        skipped: names of files that cannot be read.

    Raises:
        ConfigError: a file is not one of ids, all are empty, or none is sound.
    """
    for name in (data.path,) if isinstance(data.path, str) else data.path:
        check_finished(Path(name).expanduser())
    shards = TokenFileSet(_count_tokens(data, skipped))
    files = shards.files(data)
    if data.corrupt == "fatal":
        return shards
    faults = TokenFileStream(files, vocab_size=vocab_size).find_bad_files()
    if len(faults) == len(files):
        # Where all hold strange ids, it is the vocabulary that is wrong.
        words = [str(fault) if isinstance(fault, OutOfVocabError) else fault.cause for fault in faults.values()]
        raise ConfigError(f"data.path holds no sound file: {format_list(words)}; copy them anew")
    return shards.without({name: fault.cause for name, fault in faults.items()})


def check_same_files(token_file_set: TokenFileSet, data: DataConfig, *, skipped: Set[str]) -> None:
    """Refuse token files of a checkpoint that are not those of the recipe, or are of other lengths or order.

    Args:
        token_file_set: what the checkpoint says; those that are lost cannot be looked at, and are not.
        data: the recipe's section, of kind "tokens".
        skipped: names of files of data.path that the run never had, or that cannot be read now.

    Raises:
        ConfigError: they are; a run would read what nobody named, or number its samples in another way than it did.
    """
    theirs = {name: count for name, count in token_file_set.num_tokens.items() if name not in token_file_set.dropped}
    ours = _count_tokens(data, skipped | token_file_set.dropped.keys())
    wrong = [f"{name} is none of data.path" for name in theirs if name not in ours]
    wrong += [f"{name} is not in the checkpoint" for name in ours if name not in theirs]
    wrong += [
        f"{name} holds {ours[name]} tokens, and {count} in the checkpoint"
        for name, count in theirs.items()
        if ours.get(name, count) != count
    ]
    if not wrong and list(theirs) != list(ours):
        wrong = ["they are in another order"]
    if wrong:
        raise ConfigError(
            f"the checkpoint names other token files than the recipe: {format_list(wrong)}; its description is not of a run "
            "on this data: resume from another checkpoint, or begin anew with its weights (checkpoint.init_from)"
        )


def _count_tokens(data: DataConfig, skipped: Set[str]) -> dict[str, int]:
    """Tokens of the files of data.path that hold any, by name; reads headers."""
    counts = {
        name: read_header(path, data.token_dtype).num_tokens
        for name, path in named_sources(data)
        if name not in skipped and path.suffix in TOKEN_SUFFIXES
    }
    return {name: count for name, count in counts.items() if count}
