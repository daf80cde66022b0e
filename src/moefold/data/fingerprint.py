"""Fingerprints of data files: hashes of a few blocks of a file detect that it has changed.

A file of any size costs a few blocks of 4 KiB: the first, the last, and up to six at hashed positions between them.
With more than 4,096 files only the first and the last are read. A different length, header or end is always detected,
and a rewritten file almost always, but not a change of some bytes in the middle of a large file. Tokenizers and chat
templates are small, and a changed byte may change every id: they are also hashed as a whole.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from moefold.bounded_read import open_regular
from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import (
    CHAT_TEMPLATE_FILE,
    SKIPPED,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    has_same_content,
    is_below,
    name_below,
    table_suffix,
)
from moefold.data.skip_corrupt import skipped_files
from moefold.data.source_listing import named_sources, settings_files
from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints

BLOCK_BYTES = 4096
_MIDDLE_BLOCKS = 6
_MAX_FILES_WITH_MIDDLE_BLOCKS = 4096


def fingerprint(data: DataConfig) -> dict[str, str]:
    """Return size and block hash of every file by its name in the recipe, "skipped" for a skipped file.

    Python's own text is one entry, because its files belong together. Data without files has no entries.
    """
    sources = named_sources(data)
    skipped = _skipped(data)
    num_middle = _MIDDLE_BLOCKS if len(sources) <= _MAX_FILES_WITH_MIDDLE_BLOCKS else 0
    digests = {}
    for name, file in sources:
        try:
            digests[name] = SKIPPED if file in skipped else _fingerprint_file(name, file, num_middle)
        except ConfigError:
            if not data.drops_files:
                raise
            digests[name] = SKIPPED
    if data.kind == "python-docs":
        text = "\n".join(f"{name} {digest}" for name, digest in digests.items())
        digests = {"python-docs": f"{len(digests)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"}
    return digests | settings_fingerprints(data)


def settings_fingerprints(data: DataConfig) -> dict[str, str]:
    """Return size, block hash and hash of all bytes of each file of tokenizer and chat template by name."""
    return {
        name: f"{_fingerprint_file(name, file, _MIDDLE_BLOCKS)} {_whole_hash(name, file)}"
        for name, file in settings_files(data)
    }


def file_sizes(data: DataConfig) -> dict[str, str]:
    """Return the size of every file by name, "skipped" for a skipped file. Python's own text has no entries."""
    if data.kind == "python-docs":
        return {}
    skipped = _skipped(data)
    files = [*named_sources(data), *settings_files(data)]
    return {name: SKIPPED if file in skipped else str(file.stat().st_size) for name, file in files}


def size_differences(first: Mapping[str, str], local: Mapping[str, str]) -> dict[str, str]:
    """Return by name the differences of this rank's files from the first rank's, which may have more files."""
    if not local:
        return {}
    missing = {n: f"{n} is not there" for n, size in first.items() if n not in local and size != SKIPPED}
    sizes = {name: (first[name].split()[0] if name in first else "none", size) for name, size in local.items()}
    return missing | {
        name: f"{name} has {size} bytes, and {theirs} there" for name, (theirs, size) in sizes.items() if theirs != size
    }


def matches_fingerprint(file: Path, recorded: str) -> bool:
    """Return whether a file still has a recorded fingerprint. Raises ConfigError if the file cannot be read."""
    blocks = recorded.split()[:2]
    hashes = recorded.split()[2:]
    if not any(blocks == _fingerprint_file(file.name, file, num_middle).split() for num_middle in (_MIDDLE_BLOCKS, 0)):
        return False
    return not hashes or hashes == [_whole_hash(file.name, file)]


def _skipped(data: DataConfig) -> Set[Path]:
    """Return the skipped files, determined as for the samples: separately per part of a mixture, except token files."""
    if not data.weights or isinstance(data.path, str) or data.kind == "tokens":
        return skipped_files(data)
    sources = [replace(data, path=path, weights=()) for path in data.path]
    return frozenset(file for source in sources for file in skipped_files(source))


def _whole_hash(name: str, file: Path) -> str:
    try:
        with open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    except OSError as error:
        raise _unreadable_error(name, error) from error


def _unreadable_error(name: str, error: OSError) -> ConfigError:
    return ConfigError(f"data: {name} is not readable ({error.strerror}); give read access or leave it out")


def _fingerprint_file(name: str, file: Path, num_middle: int) -> str:
    digest = hashlib.sha256()
    try:
        with open_regular(file) as opened:
            size = opened.seek(0, 2)
            num_blocks = -(-size // BLOCK_BYTES)
            places = {0, max(0, size - BLOCK_BYTES)}
            places |= {hash_ints(size, i) % num_blocks * BLOCK_BYTES for i in range(num_middle) if num_blocks}
            for place in sorted(places):
                opened.seek(place)
                digest.update(opened.read(BLOCK_BYTES))
    except OSError as error:
        raise _unreadable_error(name, error) from error
    return f"{size} {digest.hexdigest()[:16]}"


LOCATION_KEYS = ("path", "tokenizer", "chat_template")
"""Keys of [data] with locations of files. The files are compared, not their names."""


@dataclass(frozen=True)
class DataFiles:
    """Data files of a recipe, by purpose."""

    fingerprints: Mapping[str, str]
    """Results of `fingerprint`."""
    paths: tuple[str, ...]
    """Names in data.path."""
    sources: tuple[tuple[str, ...], ...]
    """Names of the files of each path, in reading order. A data set on the hub has none."""
    settings: Mapping[str, str]
    """Names of the files of tokenizer and chat template, by role."""
    by_folder: bool
    """True if names below a folder have a meaning: they determine splits and formats (huggingface)."""

    @classmethod
    def of(cls, order: Mapping[str, Any], fingerprints: Mapping[str, str]) -> Self:
        """Sort the data files of a recipe by purpose. The order has the keys of [data]."""
        path = order.get("path", "")
        paths = tuple(str(name) for name in (path if isinstance(path, list | tuple) else [path]) if name)
        roles = _roles(order)
        settings: dict[str, str] = {}
        sources: list[list[str]] = [[] for _ in paths]
        current = 0
        for name in fingerprints:
            index = next((i for i in range(current, len(paths)) if is_below(Path(name), Path(paths[i]))), None)
            if name in roles and (index is None or not settings.keys() & {roles[name]}):
                settings[roles[name]] = name
            elif index is not None:
                current = index
                sources[index].append(name)
        return cls(fingerprints, paths, tuple(map(tuple, sources)), settings, order.get("kind") == "huggingface")

    def current_names(self, new: Self) -> dict[str, str]:
        """Return the current names of the files of a checkpoint, by their names there. A file may be missing."""
        renamed = {name: new.settings.get(role, name) for role, name in self.settings.items()}
        if len(self.paths) == len(new.paths):
            for i, (before, after) in enumerate(zip(self.sources, new.sources, strict=True)):
                renamed |= self._matched(before, new, after) or {
                    name: self._current_name(name, i, new.paths[i]) for name in before
                }
        elif all(self.sources) and all(new.sources):
            before = tuple(name for names in self.sources for name in names)
            after = tuple(name for names in new.sources for name in names)
            renamed |= self._matched(before, new, after)
        return renamed

    def _matched(self, before: Sequence[str], new: Self, after: Sequence[str]) -> dict[str, str]:
        """Return the new names by the old names if all files have the same content in the same order, or else {}."""
        if len(before) != len(after):
            return {}
        for name, other in zip(before, after, strict=True):
            saved = self.fingerprints[name]
            same = has_same_content(saved, new.fingerprints[other]) and saved != SKIPPED
            if not same or (self.by_folder and self._reader_key(name) != new._reader_key(other)):
                return {}
        return dict(zip(before, after, strict=True))

    def _current_name(self, name: str, index: int, root: str) -> str:
        """Return the name below the recipe's path of a file below a path of the checkpoint."""
        relative = _relative(name, self.paths[index])
        if not relative and self.by_folder and table_suffix(Path(name)) != table_suffix(Path(root)):
            return name
        return name_below(root, relative) if relative else root

    def _reader_key(self, name: str) -> str:
        """Return the part of a name that determines the reader: the whole name below a folder, else the suffix."""
        root = next(root for root in self.paths if is_below(Path(name), Path(root)))
        return _relative(name, root) or table_suffix(Path(name))

    def comparable(self, new: Self) -> dict[str, str]:
        """Return the new fingerprints, without the tokenizer's if the checkpoint is of an old version without it."""
        if TOKENIZER_FILE in self.settings:
            return dict(new.fingerprints)
        unknown = {name for role, name in new.settings.items() if role != "data.chat_template"}
        return {name: digest for name, digest in new.fingerprints.items() if name not in unknown}

    def unmatched_locations(self, new: Self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
        """Return the keys of `LOCATION_KEYS` that differ between checkpoint and recipe, without files to compare."""
        unmatched = []
        saved_hub_paths = [path for path, names in zip(self.paths, self.sources, strict=True) if not names]
        hub_paths = [path for path, names in zip(new.paths, new.sources, strict=True) if not names]
        saved_hub_places = [i for i, names in enumerate(self.sources) if not names]
        hub_places = [i for i, names in enumerate(new.sources) if not names]
        has_other_hub = saved_hub_paths != hub_paths or (
            bool(hub_paths) and (saved_hub_places != hub_places or len(self.paths) != len(new.paths))
        )
        if saved.get("path") != current.get("path") and has_other_hub:
            unmatched.append("path")
        for key, role in (("tokenizer", TOKENIZER_FILE), ("chat_template", "data.chat_template")):
            is_compared = role in self.settings and role in new.settings
            if not is_compared and saved.get(key) != current.get(key):
                unmatched.append(key)
        return unmatched


def _roles(order: Mapping[str, Any]) -> dict[str, str]:
    tokenizer = str(order.get("tokenizer", "bytes"))
    template = str(order.get("chat_template", ""))
    roles = {}
    if tokenizer not in ("", "bytes"):
        roles = {name: name for name in (TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE)}
        roles |= {Path(tokenizer).name: TOKENIZER_FILE, TOKENIZER_FILE: TOKENIZER_FILE}
    return roles | ({template: "data.chat_template"} if template else {})


def _relative(name: str, root: str) -> str:
    relative = str(Path(name).relative_to(Path(root)))
    return "" if relative == "." else relative
