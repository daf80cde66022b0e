"""Readers of JSON lines, JSON arrays and parquet columns, with file and line (row) in every error.

Files are untrusted: line lengths are limited. Packages receive open files, not names, so that they cannot interpret a
name as a pattern, a URL or an option.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, cast

from moefold.bounded_read import MAX_LINE_BYTES, LongLineError, bounded_lines, open_regular, parse_json
from moefold.data.input_paths import COMPRESSION_SUFFIXES
from moefold.errors import ConfigError, install_command
from moefold.message_text import closest_match, first_line

_SPACE = re.compile(r"[ \t\r\n]*")
_BLOCK_BYTES = 1 << 20


def text_blocks(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the text of an open file in blocks, without a byte order mark. Raises ConfigError if it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        while block := file.read(_BLOCK_BYTES):
            yield decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason}); convert it, or leave it out") from None


class JsonStream:
    """Values of a JSON file, read from blocks of its text. The path is for messages."""

    def __init__(self, blocks: Iterator[str], path: Path) -> None:
        self._path = path
        self._blocks = blocks
        self._text = ""
        self._position = 0
        self._line = 1
        self._counted = 0
        self._decoder = json.JSONDecoder()

    def elements(self) -> Iterator[tuple[int, str]]:
        """Yield the elements of a file that is one JSON list, each as JSON with the line (1-based) where it begins."""
        is_first = True
        self._skip("[")
        while self.peek() != "]":
            if not is_first:
                self._skip(",")
                self.peek()
            is_first = False
            line = self._count_lines()
            yield line, self._next()[1]
        self._skip("]")
        if self.peek():
            raise ConfigError(
                f"{self._path}:{self._count_lines()} has text after its list; write one list, or one object a line"
            )

    def value(self) -> Any:
        """Return the next value. Raises ConfigError if it is not JSON."""
        self.peek()
        return self._next()[0]

    def peek(self) -> str:
        """Return the next character that is not a space, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._fill():
                return ""

    def _next(self) -> tuple[Any, str]:
        """Return the value at the position, and its text."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
                # A number at the end of a block may continue in the next block.
                if end < len(self._text) or not self._fill():
                    text = self._text[self._position : end]
                    self._position = end
                    return value, text
            except json.JSONDecodeError as error:
                is_too_long = len(self._text) - self._position > MAX_LINE_BYTES
                fault = f"{error.msg} at character {error.pos - self._position}"
                if is_too_long or not self._fill():
                    raise self._error(f"is not JSON ({fault}); fix or remove the element") from None
            except RecursionError:
                raise self._error("is not JSON (it is nested too deep); fix or remove the element") from None

    def _skip(self, character: str) -> None:
        if self.peek() != character:
            raise self._error(f"has no {character!r} where the JSON list needs one: the file is broken; copy it again")
        self._position += 1

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self._count_lines()} {problem}")

    def _count_lines(self) -> int:
        """Return the line of the position."""
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def _fill(self) -> bool:
        """Read as many characters as are left in the buffer, and return whether there were any."""
        self._count_lines()
        unread = self._text[self._position :]
        blocks = [unread]
        size = 0
        while size < max(1, len(unread)) and (block := next(self._blocks, "")):
            blocks.append(block)
            size += len(block)
        self._text = "".join(blocks)
        self._position = self._counted = 0
        return size > 0


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PROBE_BYTES = 1 << 12
_ARRAY_START = re.compile(rb"\s*\[(?:\s*(?:\{|null|\]|$)|[ \t\r]*\n)")


class ColumnError(ConfigError):
    """Error of a readable, undamaged file that lacks a column, or has a value in it that is not a text."""


@dataclass(frozen=True, slots=True)
class JsonlRecord:
    """A JSON object and its location."""

    location: str
    """FILE:LINE, 1-based, and for an array also the number of the element."""
    fields: dict[str, Any]
    size_bytes: int
    """Length of the line after decompression, including the line end."""


def open_lines(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in one of `COMPRESSION_SUFFIXES`."""
    try:
        opened = open_regular(path)
    except OSError as error:
        raise ConfigError(f"{path} is not readable ({error.strerror}); give read access or leave it out") from error
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=opened, mode="rb"))
    if path.suffix == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(opened, "rb"))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(opened, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(import_pyarrow(path).CompressedInputStream(opened, "zstd"))
    return opened


def decoded_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with line ends, without a byte order mark. Raises ConfigError if one is not UTF-8."""
    with open_lines(path) as file, translated_read_errors(path):
        for number, line in enumerate(bounded_lines(file), 1):
            yield _decode_line(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line, f"{path}:{number}")


@contextmanager
def translated_read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading and decompressing a file into ConfigError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        kind = {".gz": "gzip ", ".bz2": "bzip2 ", ".xz": "xz "}.get(path.suffix, "")
        raise ConfigError(f"{path} is not a complete {kind}file ({error}); copy it again or leave it out") from error
    except LongLineError as error:
        raise ConfigError(f"{path}: {error}; split or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); copy it again") from error


def _decode_line(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 ({error.reason} at byte {error.start} of the line); fix it") from None


def jsonl_records(path: Path, skip: Callable[[ConfigError], None] | None = None) -> Iterator[JsonlRecord]:
    """Yield the objects of a file in order: one for each non-empty line, or the elements of a JSON array.

    Raises:
        ConfigError: the file is not readable, or a line is not one JSON object in UTF-8 and `skip` is not given.
    """
    with open_lines(path) as file, translated_read_errors(path):
        is_array = _is_array(file)
        lines = _array_elements(file, path) if is_array else enumerate(bounded_lines(file), 1)
        for element, (number, line) in enumerate(lines, 1):
            if record := _parse_or_skip(line, path, number, element if is_array else 0, skip):
                yield record


def parse_line(line: bytes, path: Path, number: int, element: int = 0) -> JsonlRecord | None:
    """Parse line `number` (1-based) of a file, and return None if the line is empty.

    Args:
        element: number of an element of an array, 1-based, as a line may hold several. 0: the whole line.

    Raises:
        ConfigError: the text is not one JSON object in UTF-8.
    """
    place = f"{path}:{number} (element {element})" if element else f"{path}:{number}"
    text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    if not text.strip():
        return None
    decoded = _decode_line(text, place)
    try:
        fields = parse_json(decoded)
    except ValueError as error:
        fault = str(error)
        if isinstance(error, json.JSONDecodeError):
            fault = f"{error.msg} at column {error.colno}"
        raise ConfigError(f"{place} is not JSON ({fault}); fix or remove the line") from None
    if not isinstance(fields, dict):
        texts = fields if isinstance(fields, list) else [fields] * bool(element)
        is_texts = texts != [] and all(isinstance(text, str) for text in texts)
        # The output needs another name: a shell first empties the file that it writes.
        command = f"jq -c '.[] | {{text: .}}' {quote(path.name)} > {quote(path.stem + '-rows.jsonl')}"
        hint = f"; for a list of texts: {command}" if is_texts else ""
        raise ConfigError(
            f"{place} holds {json_type_name(fields)}, but every {'element' if element else 'line'} must be an object "
            f"such as {{...}}; fix it{hint}"
        )
    if repeated := _repeated_key(text):
        raise ConfigError(f"{place} has the key {repeated!r} twice in one object; remove one")
    return JsonlRecord(place, fields, len(line))


def _parse_or_skip(
    line: bytes, path: Path, number: int, element: int, skip: Callable[[ConfigError], None] | None
) -> JsonlRecord | None:
    try:
        return parse_line(line, path, number, element)
    except ConfigError as error:
        if skip is None:
            raise
        skip(error)
        return None


def is_json_array(path: Path) -> bool:
    """Return whether a file holds one JSON array, and not one value per line."""
    with open_lines(path) as file, translated_read_errors(path):
        return _is_array(file)


def _is_array(file: BinaryIO) -> bool:
    start: bytes = cast(Any, file).peek(_PROBE_BYTES)[:_PROBE_BYTES]
    return _ARRAY_START.match(start.removeprefix(_BYTE_ORDER_MARK)) is not None


def _array_elements(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    for line, text in JsonStream(text_blocks(file, path), path).elements():
        yield line, text.encode()


def _repeated_key(text: bytes) -> str:
    """Return a key that occurs twice in an object, at any depth, or "" if there is none."""
    repeated: list[str] = []

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            repeated.append(next(name for name in names if names.count(name) > 1))

    json.loads(text, object_pairs_hook=check)
    return repeated[0] if repeated else ""


def column_text(fields: Mapping[str, Any], column: str, location: str) -> str:
    """Return the text of one column of an object. Raises ColumnError if the column is absent or holds no text."""
    if column not in fields:
        raise ColumnError(f"{location}: {unknown_column_message(column, fields)}")
    text = fields[column]
    if not isinstance(text, str):
        raise ColumnError(f"{location}: column {column!r} holds {json_type_name(text)}, not text; fix or remove it")
    refuse_surrogates(text, f"{location}: column {column!r}")
    return text


def refuse_surrogates(text: str, subject: str) -> None:
    """Raise ConfigError if a text has lone surrogates, which JSON can express and UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{subject} is not Unicode text ({error.reason} at character {error.start}); fix it"
        ) from None


def unknown_column_message(column: str, columns: Mapping[str, Any] | list[str]) -> str:
    """Return the message for a missing column, with the nearest name or the existing columns."""
    names = sorted(columns)
    guess = closest_match(column, names)
    listed_names = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    hint = f"the columns are {listed_names}" if names else "there are no columns"
    if guess:
        hint = f"did you mean {guess!r}?"
    return f"no column {column!r}; {hint}"


def json_type_name(value: object) -> str:
    """Return the name of a value's type in JSON, with an article."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_BATCH_ROWS = 1024


def open_parquet(path: Path) -> Any:
    """Open a parquet file as `pyarrow.parquet.ParquetFile`. Only its footer is read."""
    pyarrow = import_pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(open_seekable(path))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a complete parquet file ({error}); copy it again or leave it out") from error


def open_seekable(path: Path) -> BinaryIO:
    """Open a file for random access. A compressed file is decompressed to a temporary copy."""
    if path.suffix not in COMPRESSION_SUFFIXES:
        return open_regular(path)
    copy = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
    with open_lines(path) as opened, translated_read_errors(path):
        shutil.copyfileobj(opened, copy)
    copy.seek(0)
    return copy


def import_pyarrow(path: Path) -> Any:
    """Return the package pyarrow. `path` is for the message if the package is missing."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed; install the extra hf: {install_command('hf')}"
        ) from error
    return pyarrow


def column_values(path: Path, column: str, row_groups: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the values of an existing column, each with its row number (1-based), of consecutive row groups or of all.

    Raises:
        ConfigError: the file is damaged, or a text is not UTF-8. The message has the row.
    """
    from pyarrow import ArrowException

    file = open_parquet(path)
    groups = list(range(file.num_row_groups) if row_groups is None else row_groups)
    row = sum(file.metadata.row_group(group).num_rows for group in range(groups[0])) if groups else 0
    batches = file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=[column])
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            values = python_values(batch.column(column), path, column, row)
        except (OSError, ArrowException) as error:
            raise ConfigError(
                f"{path} is damaged after row {row} (column {column!r}: {first_line(error)}); copy it again or leave "
                "it out"
            ) from error
        for value in values:
            row += 1
            yield row, value


def python_values(values: Any, path: Path, column: str, row: int) -> list[Any]:
    """Return the values of a part of a column after row `row`. Raises ConfigError if a text is not UTF-8."""
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:
        for number, value in enumerate(values, row + 1):
            _check_utf8(value, f"{path}: column {column!r} holds no UTF-8 in row {number}")
        raise


def _check_utf8(value: Any, message: str) -> None:
    try:
        value.as_py()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{message} ({error.reason} at byte {error.start}); fix the text or write it again as UTF-8"
        ) from None
