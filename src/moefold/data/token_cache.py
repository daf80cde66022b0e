"""Cache of tokenised text: each entry is written once, atomically, then read by every rank.

An entry is `<key>.npy`. The key hashes the sources (paths, sizes, times), the tokenizer and the format, so a changed
file or tokenizer gives another entry. A writer holds a lock and writes to a temporary file, which is renamed after an
fsync: a killed writer leaves a temporary file that is never read and that a later writer deletes.
"""

import contextlib
import logging
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import batch_by_size
from moefold.cache_dir import _is_untrusted_dir, cache_folders, entry_key
from moefold.data.sources.text_source import Corpus, TextChunk
from moefold.data.token_file import read_npy_header
from moefold.data.tokenizer import Tokenizer, encode_documents
from moefold.errors import ConfigError
from moefold.file_lock import FileLock, open_lock_file
from moefold.message_text import Problem
from moefold.progress import ReadProgress

if TYPE_CHECKING:
    from moefold.data.sources.huggingface import TextTables

FORMAT_VERSION = 1
_BATCH_CHARACTERS = 2**22
_NPY_HEADER_BYTES = 128
_STALE_TMP_AGE_S = 24 * 3600

logger = logging.getLogger(__name__)


def cached_tokens(
    corpus: "Corpus | TextTables", tokenizer: Tokenizer, *, cache_dir: Path | None = None, shows_progress: bool
) -> Path:
    """Return the .npy file with the tokens of a corpus, from the cache or tokenised now, with separators of documents.

    Args:
        cache_dir: cache folder, `default_cache_dir()` for None. If it is not writable, a folder of this user below
            the system's temporary folder is used, with a warning.

    Raises:
        ConfigError: a source is not readable text, there is no token, or no folder is writable.
    """

    def write(file: BinaryIO) -> None:
        with ReadProgress("Tokenising", corpus.size_bytes, is_shown=shows_progress) as progress:
            num_tokens, _ = write_tokens(file, corpus.chunks(), tokenizer, progress.advance)
        if not num_tokens:
            rule = "holds no text: everything is empty or left out"
            raise ConfigError(Problem("data.path", None, rule, "name files with text in them"))

    return cached_ids(cache_key(corpus, tokenizer), write, cache_dir=cache_dir)


def cached_ids(key: str, write: Callable[[BinaryIO], None], *, cache_dir: Path | None = None) -> Path:
    """Return the .npy file of ids named `key`, from the cache or written now by `write`, which may seek.

    Of concurrent processes, one writes and the others wait for its lock. The key changes with anything that changes the
    ids.

    Raises:
        ConfigError: no folder is writable. Exceptions of `write` pass.
    """
    name = f"{key}.npy"
    folders = cache_folders(cache_dir)
    for folder in folders:
        if is_complete(folder / name) and not _is_untrusted_dir(folder):
            return folder / name
    reasons = []
    for folder in folders:
        try:
            return _make_entry(folder, name, write)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
            logger.warning("The token cache cannot be written in %s (%s)", folder, error.strerror or error)
    raise ConfigError(
        f"no folder for the tokenised text can be written ({'; '.join(reasons)}); "
        "set the environment variable XDG_CACHE_HOME to a folder with free space"
    )


def cache_key(corpus: "Corpus | TextTables", tokenizer: Tokenizer) -> str:
    """Return the name of an entry: 32 hexadecimal digits that change with anything that changes the tokens."""
    identity = [FORMAT_VERSION, corpus.kind, corpus.identity, tokenizer.identity, tokenizer.separator_id]
    return entry_key(identity)


def is_complete(path: Path) -> bool:
    """Return whether the path is a complete .npy array of at least one id (its length fits its header)."""
    return is_complete_array(path) and read_npy_header(path).num_tokens > 0


def is_complete_array(path: Path) -> bool:
    """Return whether the path is a complete .npy array of ids, possibly empty."""
    if not path.is_file():
        return False
    try:
        read_npy_header(path)
    except ConfigError:
        return False
    return True


def _make_entry(folder: Path, name: str, write: Callable[[BinaryIO], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if _is_untrusted_dir(folder):
        raise PermissionError(f"{folder} belongs to another user")
    entry = folder / name
    with _lock(entry.with_suffix(".lock")):
        if is_complete(entry):
            return entry
        _remove_stale_tmp_files(folder)
        unfinished = folder / f"{entry.stem}.{uuid.uuid4().hex}.tmp"
        try:
            with unfinished.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(entry)
        finally:
            unfinished.unlink(missing_ok=True)
    return entry


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock that ends with the process. Without lock support, processes may duplicate the work."""
    with FileLock(open_lock_file(path)) as lock:
        try:
            lock.acquire()
        except OSError as error:
            logger.warning("%s cannot be locked (%s): several ranks may tokenise the same text", path, error.strerror)
        yield


def _remove_stale_tmp_files(folder: Path) -> None:
    # A writer modifies its file continuously, so the writer of an old file was killed.
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _STALE_TMP_AGE_S:
                path.unlink()


def write_tokens(
    file: BinaryIO,
    chunks: Iterable[TextChunk],
    tokenizer: Tokenizer,
    report: Callable[[int], None],
    index: BinaryIO | None = None,
) -> tuple[int, int]:
    """Write the ids of documents, each with its separator, as an .npy file. Return the number of ids and of documents.

    Args:
        report: called with the bytes of source text, some megabytes at a time.
        index: receives the end of each document, int64, or None if there is no index.
    """
    dtype = np.min_scalar_type(max(tokenizer.vocab_size, 1) - 1).newbyteorder("<")
    separator = np.array([] if tokenizer.separator_id is None else [tokenizer.separator_id], dtype=np.int64)
    file.write(npy_header(dtype, 0))
    num_tokens = num_documents = 0
    for pieces in batch_by_size(chunks, lambda piece: len(piece.text), _BATCH_CHARACTERS):
        ends: list[int] = []
        arrays: list[NDArray[np.int64]] = []
        for piece, ids in zip(pieces, encode_documents(tokenizer, [piece.text for piece in pieces]), strict=True):
            arrays += [ids, separator] if piece.ends_document else [ids]
            num_tokens += len(ids) + (len(separator) if piece.ends_document else 0)
            if piece.ends_document:
                ends.append(num_tokens)
        file.write(np.concatenate(arrays).astype(dtype).tobytes())
        if index is not None:
            index.write(np.array(ends, dtype="<i8").tobytes())
        num_documents += len(ends)
        report(sum(piece.size_bytes for piece in pieces))
    file.seek(0)
    file.write(npy_header(dtype, num_tokens))
    return num_tokens, num_documents


def npy_header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """Return a version 1.0 .npy header of fixed length, so that the count can be filled in last."""
    described = repr({"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)})
    length = _NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + described.ljust(length - 1).encode("ascii") + b"\n"
