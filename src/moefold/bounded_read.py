"""Bounded readers of untrusted files: limits on bytes, nesting depth and number of values.

A user's path may name an endless pipe, a device, or a small file that expands to gigabytes. Each reader refuses
everything except regular files before opening. It compares the size with a limit before reading. It never reads more
than the limit, even if the reported size is wrong (/proc) or grows. A refused file is an `OSError` whose `strerror` is
the reason, so that it is reported like an unreadable file. Refused content is a `ValueError`.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from moefold.remote_path import RemotePath
from moefold.units import MIB

MAX_RECIPE_BYTES = MIB
"""Recipe or device: the longest shipped file has 4 KiB, and a list of 10,000 data files fits."""
MAX_SCHEDULE_BYTES = 64 * MIB
"""Schedule as CSV, 8 bytes per cell: 64 ranks with 4 stages each and 4,096 micro-batches have 17 MB."""
MAX_TABLE_BYTES = 16 * MIB
"""Table of published measurements. The largest known has 200 KiB."""
MAX_CONFIG_BYTES = 16 * MIB
"""config.json, tokenizer_config.json and similar: the largest, with 100,000 added tokens, have 10 to 15 MB."""
MAX_TEMPLATE_BYTES = MIB
"""Chat template: the longest of known models has 20 KiB."""
MAX_TOKENIZER_BYTES = 256 * MIB
"""tokenizer.json: the largest of known models has 35 MB (262,144 entries with their merges)."""
MAX_INDEX_BYTES = 128 * MIB
"""Index or manifest of a folder of tensors, 200 bytes per tensor: 100,000 tensors are 20 MB."""
MAX_DESCRIPTION_BYTES = 64 * MIB
"""Description or manifest of a checkpoint: 150 bytes per data file or rank, with up to 100,000 of these."""
MAX_LINE_BYTES = 64 * MIB
"""Line of JSON: a document, a conversation, or the metrics of a step. A book has 1 MB."""
MAX_TEXT_BYTES = 1 << 30
"""Text that is tokenised as a whole. `moefold tokenize` accepts larger texts."""
MAX_JSON_DEPTH = 100
"""Nesting depth of a JSON or TOML document. Recursive code may need a few calls per level, and Python allows 1,000."""
MAX_JSON_VALUES = 8_000_000
"""Values of a JSON document: an empty list takes 2 bytes in the file and 64 in memory. 8 million values are an index of
a million tensors."""
MAX_KEY_PARTS = 32
"""Parts of a dotted TOML key, whose parsing time is quadratic in their number. Settings have two."""

_BLOCK_BYTES = MIB
_IRREGULAR_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
# Linear-time patterns: possessive quantifiers never backtrack, and the closing quote is optional.
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_TOML_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|' + r"'[^'\n]*+'?")
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}")


class RefusedFileError(OSError):
    """Refused file: not regular, or too large."""

    def __init__(self, number: int, reason: str, path: Path) -> None:
        super().__init__(number, reason, str(path))

    def __str__(self) -> str:
        """Return only the reason: the caller's message names the file."""
        return str(self.strerror)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for a writer if the path is a pipe.

    Raises:
        IsADirectoryError: the path is a folder.
        OSError: it is a pipe, a device or a socket, or cannot be opened.
    """
    check_regular_file(path)
    if isinstance(path, RemotePath):
        opened: BufferedReader = path.open("rb")
        return opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        # The file may have been replaced since the check.
        _refuse_irregular_mode(path, os.fstat(descriptor).st_mode)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular_file(path: Path) -> None:
    """Check that a path is a regular file, before a library opens it by name.

    Raises:
        IsADirectoryError: the path is a folder.
        OSError: it is a pipe, a device or a socket, or does not exist.
    """
    if "\0" in str(path):
        raise RefusedFileError(errno.EINVAL, "its path has a NUL character", path)
    _refuse_irregular_mode(path, path.stat().st_mode)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: the file cannot be read, is not regular, or is larger.
    """
    if isinstance(path, RemotePath):
        check_regular_file(path)
        _refuse_oversized(path, path.stat().st_size, limit)
        return path.read_bytes()
    with open_regular(path) as file:
        _refuse_oversized(path, os.fstat(file.fileno()).st_size, limit)
        content = file.read(limit + 1)
    _refuse_oversized(path, len(content), limit)
    return content


def read_text(path: Path, limit: int) -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes: no byte order mark, each line end as a line feed.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: the content is not UTF-8.
    """
    text = read_bytes(path, limit).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, limit: int) -> Any:
    """Return the content of a JSON file of at most `limit` bytes.

    Raises:
        OSError: see `read_bytes`.
        ValueError: the content is not UTF-8 or not JSON, or exceeds `MAX_JSON_DEPTH` or `MAX_JSON_VALUES`.
    """
    return parse_json(read_bytes(path, limit))


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """Return the object of a JSON file. Raise as `read_json`, and ValueError if the content is not an object."""
    content = read_json(path, limit)
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of bounded depth and number of values. A byte order mark is ignored.

    Raises:
        ValueError: the content is not UTF-8 or not JSON, or exceeds `MAX_JSON_DEPTH` or `MAX_JSON_VALUES`.
    """
    decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    # Each value except the first follows a comma or a bracket. Strings are removed only if the first count is too high.
    if _num_values(decoded) > MAX_JSON_VALUES and _num_values(_JSON_STRING.sub("", decoded)) > MAX_JSON_VALUES:
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        document = json.loads(decoded)
    except RecursionError:
        raise _depth_error() from None
    # The number of levels is at most the number of opening brackets: most lines of JSON need no traversal.
    if decoded.count("[") + decoded.count("{") > MAX_JSON_DEPTH:
        _refuse_too_deep(document)
    return document


def format_json(document: Any, limit: int) -> str:
    """Return JSON text that `read_json` accepts with the same limit, indented if the limit allows it.

    Raises:
        ValueError: the text would be too large or too deep, or a value has no form in JSON.
    """
    try:
        text = json.dumps(document, indent=2) + "\n"
        if len(text) > limit:
            text = json.dumps(document, separators=(",", ":")) + "\n"
    except RecursionError:
        raise _depth_error() from None
    # Only ASCII: the number of bytes is the number of characters.
    if len(text) > limit:
        raise ValueError(f"it has {len(text):,} bytes, and {limit:,} can be read")
    parse_json(text)
    return text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML of bounded depth.

    Raises:
        tomllib.TOMLDecodeError: the text is not TOML, is nested too deep, or has a number that Python cannot parse.
    """
    if _LONG_KEY.search(text) or _LONG_KEY.search(_TOML_STRING.sub("_", text)):
        raise tomllib.TOMLDecodeError(f"a key has more than {MAX_KEY_PARTS} parts")
    try:
        document = tomllib.loads(text)
        _refuse_too_deep(document)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(str(_depth_error())) from None
    except ValueError:
        # Python does not parse decimal numbers of more than 4,300 digits.
        raise tomllib.TOMLDecodeError("a number has thousands of digits") from None
    return document


def bounded_lines(file: BinaryIO, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of an open file, each with its line end.

    Raises:
        LongLineError: a line is longer than `limit` bytes. Reading stops there.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise LongLineError(number, limit)
        yield line


class LongLineError(ValueError):
    """Line longer than the limit."""

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(f"line {number:,} is longer than {limit:,} bytes")


def have_same_content(first: Path, second: Path) -> bool:
    """Return whether two regular files have equal content, reading one block of each at a time.

    Raises:
        OSError: a file cannot be read or is not regular.
    """
    with open_regular(first) as first_file, open_regular(second) as other_file:
        if first.stat().st_size != second.stat().st_size:
            return False
        while True:
            block = first_file.read(_BLOCK_BYTES)
            if block != other_file.read(_BLOCK_BYTES):
                return False
            if not block:
                return True


def _refuse_irregular_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for is_kind, name in _IRREGULAR_KINDS:
        if is_kind(mode):
            raise RefusedFileError(errno.EINVAL, f"it is {name}, not a regular file", path)


def _refuse_oversized(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise RefusedFileError(errno.EFBIG, f"it has more than the {limit:,} bytes that such a file may have", path)


def _refuse_too_deep(document: Any) -> None:
    """Raise ValueError for a document with more levels than `MAX_JSON_DEPTH`."""
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _depth_error()


def _num_values(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _depth_error() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


T = TypeVar("T")


def batch_by_size(items: Iterable[T], size: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Split a sequence into batches of consecutive items, each of at most `max_size` in total or of one larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > max_size:
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
