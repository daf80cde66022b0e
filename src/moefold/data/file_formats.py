"""JSON lines: one object a line, with the file and the line in every complaint.

Arrays of numbers in .npy files of anybody's making: mapped, never unpickled, and refused in one kind of error.

Columns of parquet files, with the file and the row in every complaint.
"""

import gzip
import json
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from moefold.bounded_read import LongLineError, bounded_lines, check_regular_file, open_regular, parse_json
from moefold.config.suggestions import closest_match
from moefold.errors import ConfigError

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonlRecord:
    """One object and where it stands."""

    location: str
    """FILE:LINE, 1-based."""
    fields: dict[str, Any]
    size_bytes: int
    """Length of the line, its end included, as it is after decompression."""


def is_jsonl(path: Path) -> bool:
    """Whether a file's name says that it holds JSON lines."""
    return path.name.lower().endswith(SUFFIXES)


def open_lines(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz.

    Raises:
        ConfigError: it is not readable.
    """
    try:
        check_regular_file(path)
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open_regular(path)
    except OSError as error:
        raise ConfigError(f"{path} is not readable ({error.strerror}); give read access or leave it out") from error


def jsonl_records(path: Path) -> Iterator[JsonlRecord]:
    """The objects of a file in order; empty lines are skipped.

    Raises:
        ConfigError: the file is not readable, or a line is not one JSON object in UTF-8; file and line are named.
    """
    with open_lines(path) as file:
        try:
            for number, line in enumerate(bounded_lines(file), 1):
                if record := parse_line(line, path, number):
                    yield record
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{path} is not a complete gzip file ({error}); copy it anew or leave it out") from error
        except LongLineError as error:
            raise ConfigError(f"{path}: {error}; cut it, or take it out") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror or error}); copy it anew") from error


def parse_line(line: bytes, path: Path, number: int) -> JsonlRecord | None:
    """The object of line `number` (1-based) of a file; None if the line is empty.

    Raises:
        ConfigError: it is not one JSON object in UTF-8.
    """
    place = f"{path}:{number}"
    text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    if not text.strip():
        return None
    try:
        fields = parse_json(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8 ({error.reason} at byte {error.start} of the line); mend it") from None
    except ValueError as error:
        where = str(error)
        if isinstance(error, json.JSONDecodeError):
            where = f"{error.msg} at column {error.colno}"
        raise ConfigError(f"{place} is not JSON ({where}); mend the line or take it out") from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{place} holds {_json_type_name(fields)}, but every line must be an object such as {{...}}; mend it"
        )
    return JsonlRecord(place, fields, len(line))


def column_text(fields: Mapping[str, Any], column: str, location: str) -> str:
    """The text of one column of an object.

    Raises:
        ConfigError: the column is absent (the nearest name is given) or holds no text.
    """
    if column not in fields:
        raise ConfigError(f"{location}: {unknown_column_message(column, fields)}")
    text = fields[column]
    if not isinstance(text, str):
        raise ConfigError(
            f"{location}: column {column!r} holds {_json_type_name(text)}, not text; mend it or take the line out"
        )
    reject_surrogates(text, f"{location}: column {column!r}")
    return text


def reject_surrogates(text: str, subject: str) -> None:
    """Raise ConfigError if a text holds halves of characters, which JSON can spell and no encoding knows."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{subject} is not Unicode text ({error.reason} at character {error.start}); mend it"
        ) from None


def unknown_column_message(column: str, columns: Mapping[str, Any] | list[str]) -> str:
    """The words for a column that is not there, with the nearest name or those that there are."""
    names = sorted(columns)
    guess = closest_match(column, names)
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    hint = f"did you mean {guess!r}?" if guess else f"the columns are {shown}" if names else "there are no columns"
    return f"no column {column!r}; {hint}"


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_INVALID_FILE_ERRORS = (
    EOFError,
    MemoryError,
    OSError,
    OverflowError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
)
"""What numpy raises on a file that is none: its header is read by Python's own tokenizer."""


def map_npy(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    """Map an array read-only; reads its header alone.

    Raises:
        ValueError: it cannot be read, is no complete array of plain numbers, or an archive of several.
    """
    try:
        check_regular_file(path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except _INVALID_FILE_ERRORS as error:
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive of arrays, not one array")
    return array


_BATCH_ROWS = 1024


def open_parquet(path: Path) -> Any:
    """Open a file; reads its description only.

    Returns:
        A `pyarrow.parquet.ParquetFile`.

    Raises:
        ConfigError: it is not readable, or no complete parquet file.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed; install the extra hf: pip install -e '.[hf]'"
        ) from error
    try:
        check_regular_file(path)
        return ParquetFile(path)
    except (OSError, ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a complete parquet file ({error}); copy it anew or leave it out") from error


def column_values(path: Path, column: str, row_groups: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
    """The values of a column, each with the number of its row (1-based).

    Args:
        path: the file.
        column: one that the file has.
        row_groups: row groups next to each other; None: all.

    Raises:
        ConfigError: the file is damaged, or a text is no UTF-8; the row is named.
    """
    from pyarrow import ArrowException

    file = open_parquet(path)
    chosen = list(range(file.num_row_groups) if row_groups is None else row_groups)
    row = sum(file.metadata.row_group(group).num_rows for group in range(chosen[0])) if chosen else 0
    batches = file.iter_batches(_BATCH_ROWS, row_groups=chosen, columns=[column])
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            values = _to_python_values(batch.column(0), path, column, row)
        except (OSError, ArrowException) as error:
            raise ConfigError(
                f"{path} is damaged behind row {row} (column {column!r}: {_first_line(error)}); copy it anew or leave "
                "it out"
            ) from error
        for value in values:
            row += 1
            yield row, value


def _to_python_values(values: Any, path: Path, column: str, row: int) -> list[Any]:
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
            f"{message} ({error.reason} at byte {error.start}); mend the text or write it anew as UTF-8"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
