"""Fingerprints of data files: detect that a file has changed by hashing a few blocks of it.

A file of any size costs a few blocks of 4 KiB: the first, the last, and up to six at hashed positions between them;
with more than 4,096 files only the first and the last. So another length, header or end is always noticed, and a
rewritten file almost always; a change of some bytes in the middle of a large file is not. Tokenizers and chat templates
are small, and one changed byte of theirs changes every id: they are hashed as a whole, too.
"""

import hashlib
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path

from moefold.bounded_read import open_regular
from moefold.config.data import DataConfig
from moefold.data.index_shuffle import hash_ints
from moefold.data.input_paths import SKIPPED
from moefold.data.skip_corrupt import skipped_files
from moefold.data.source_listing import named_sources, settings_files
from moefold.errors import ConfigError

BLOCK_BYTES = 4096
_MIDDLE_BLOCKS = 6
_MAX_FILES_WITH_MIDDLE_BLOCKS = 4096


def fingerprint(data: DataConfig, *, cache_dir: Path | None = None) -> dict[str, str]:
    """Return size and block hash of every file by its name in the recipe, "skipped" for one that is left out.

    Python's own text is one entry, as its files belong together; data without files has none.

    Raises:
        ConfigError: a file cannot be read.
    """
    sources = named_sources(data)
    skipped = _skipped(data, cache_dir)
    num_middle = _MIDDLE_BLOCKS if len(sources) <= _MAX_FILES_WITH_MIDDLE_BLOCKS else 0
    found = {}
    for name, file in sources:
        try:
            found[name] = SKIPPED if file in skipped else _fingerprint_file(name, file, num_middle)
        except ConfigError:
            if not data.drops_files:
                raise
            found[name] = SKIPPED
    if data.kind == "python-docs":
        text = "\n".join(f"{name} {seen}" for name, seen in found.items())
        found = {"python-docs": f"{len(found)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"}
    return found | settings_fingerprints(data)


def settings_fingerprints(data: DataConfig) -> dict[str, str]:
    """Return the identity of tokenizer and chat template: size, block hash and hash of all bytes of each file by name.

    Raises:
        ConfigError: a file cannot be read.
    """
    return {
        name: f"{_fingerprint_file(name, file, _MIDDLE_BLOCKS)} {_whole_hash(name, file)}"
        for name, file in settings_files(data)
    }


def file_sizes(data: DataConfig, *, cache_dir: Path | None = None) -> dict[str, str]:
    """Return the size of every file by name, "skipped" for one that is left out; reads nothing.

    Empty for Python's own text.
    """
    if data.kind == "python-docs":
        return {}
    skipped = _skipped(data, cache_dir)
    files = [*named_sources(data), *settings_files(data)]
    return {name: SKIPPED if file in skipped else str(file.stat().st_size) for name, file in files}


def size_differences(first: Mapping[str, str], local: Mapping[str, str]) -> list[str]:
    """Return descriptions of how the files here differ from the files of the first rank, which may have more."""
    return list(size_differences_by_file(first, local).values())


def size_differences_by_file(first: Mapping[str, str], local: Mapping[str, str]) -> dict[str, str]:
    """Return the descriptions of `size_differences` by file name."""
    if not local:
        return {}
    missing = {n: f"{n} is not there" for n, seen in first.items() if n not in local and seen != SKIPPED}
    sizes = {name: (first[name].split()[0] if name in first else "none", seen) for name, seen in local.items()}
    return missing | {
        name: f"{name} has {seen} bytes, and {theirs} there" for name, (theirs, seen) in sizes.items() if theirs != seen
    }


def matches_fingerprint(file: Path, recorded: str) -> bool:
    """Return whether a file still has a recorded fingerprint; raise ConfigError if the file cannot be read."""
    blocks = recorded.split()[:2]
    whole = recorded.split()[2:]
    if not any(blocks == _fingerprint_file(file.name, file, num_middle).split() for num_middle in (_MIDDLE_BLOCKS, 0)):
        return False
    return not whole or whole == [_whole_hash(file.name, file)]


def _skipped(data: DataConfig, cache_dir: Path | None) -> Set[Path]:
    """Return the skipped files, determined as for the samples: separately per part of a mixture, except token files."""
    if not data.weights or isinstance(data.path, str) or data.kind == "tokens":
        return skipped_files(data, cache_dir=cache_dir)
    parts = [replace(data, path=path, weights=()) for path in data.path]
    return frozenset(file for part in parts for file in skipped_files(part, cache_dir=cache_dir))


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
