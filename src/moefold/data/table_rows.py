"""Texts of one column of a table file: parquet, arrow, CSV, TSV, JSON lines, a JSON array; text files by line.

Text stays text: no cell is taken for a number, a date or a missing value. Files are read in parts of bounded size, and
every error names the file and the row.
"""

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_LINE_BYTES, parse_json
from moefold.data.file_formats import (
    ColumnError,
    column_text,
    column_values,
    decoded_lines,
    import_pyarrow,
    jsonl_records,
    open_lines,
    open_parquet,
    open_seekable,
    python_values,
    translated_read_errors,
    unknown_column_message,
)
from moefold.data.json_stream import JsonStream, text_blocks
from moefold.data.source_listing import table_suffix
from moefold.errors import ConfigError

TABLE_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of files that are tables by themselves."""
FOLDER_SUFFIXES = (*TABLE_SUFFIXES, ".txt")
"""Suffixes of files in a folder: the lines of a text file are rows, as in the package `datasets`."""
_SLICE_ROWS = 1024
_END = "\0end of file"
"""Line after the last one of a CSV file: it is a row of its own, unless a quote is still open."""
_INNER_LINE_END = re.compile(r"(?<=\r)(?!\n)")
_LONG_LINE_CHARACTERS = 1 << 18
"""Characters of a first line that need not be whole in the first block of a file."""


def text_rows(file: Path, column: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the texts of a column from row `start` on, each with its row number (0-based).

    Raises:
        ColumnError: the file lacks the column, or a row holds no text.
        ConfigError: the file is broken.
    """
    suffix = table_suffix(file)
    if suffix == ".parquet":
        yield from _checked(_parquet_values(file, column, start), file, column)
    elif suffix == ".arrow":
        yield from _checked(_arrow_values(file, column, start), file, column)
    else:
        readers = {".csv": _csv_texts, ".tsv": _csv_texts, ".txt": _line_texts}
        texts = readers.get(suffix, _json_texts)(file, column)
        for row, text in enumerate(texts):
            if row >= start:
                yield row, text


def _checked(values: Iterator[tuple[int, Any]], file: Path, column: str) -> Iterator[tuple[int, str]]:
    for row, value in values:
        if not isinstance(value, str):
            what = "nothing" if value is None else type(value).__name__
            raise ColumnError(
                f"data.column={column!r} of {file} holds {what}, not text, in row {row + 1}; name a column of text, or "
                "remove the row"
            )
        yield row, value


def _check_column(file: Path, column: str, names: list[str]) -> None:
    if column not in names:
        raise ColumnError(f"data.column={column!r}: {file} has {unknown_column_message(column, names)}")
    if names.count(column) > 1:
        raise ColumnError(f"data.column={column!r}: {file} has the column twice; remove one")


def _parquet_values(file: Path, column: str, start: int) -> Iterator[tuple[int, Any]]:
    opened = open_parquet(file)
    _check_column(file, column, opened.schema_arrow.names)
    end = 0
    first = 0
    while first < opened.num_row_groups and (end := end + opened.metadata.row_group(first).num_rows) <= start:
        first += 1
    for row, value in column_values(file, column, range(first, opened.num_row_groups)):
        if row > start:
            yield row - 1, value


def _arrow_values(file: Path, column: str, start: int) -> Iterator[tuple[int, Any]]:
    pyarrow = import_pyarrow(file)
    row = 0
    try:
        with open_seekable(file) as opened:
            for part in _arrow_parts(opened, file, column):
                if row + len(part) > start:
                    values = python_values(part, file, column, row)
                    yield from ((row + i, value) for i, value in enumerate(values) if row + i >= start)
                row += len(part)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{file} is damaged after row {row} ({str(error).splitlines()[0]}); copy it again or leave it out"
        ) from error


def _arrow_parts(opened: Any, file: Path, column: str) -> Iterator[Any]:
    """Yield the column of an arrow file in parts."""
    for batch in _arrow_batches(opened, file, column):
        for first in range(0, batch.num_rows, _SLICE_ROWS):
            yield batch.column(column).slice(first, _SLICE_ROWS)


def _arrow_batches(opened: Any, file: Path, column: str) -> Iterator[Any]:
    """Yield the record batches of an arrow file or stream, with the one column."""
    from pyarrow import ipc

    is_file = opened.read(6) == b"ARROW1"
    opened.seek(0)
    names = (ipc.open_file if is_file else ipc.open_stream)(opened).schema.names
    _check_column(file, column, names)
    options = ipc.IpcReadOptions(included_fields=[names.index(column)])
    opened.seek(0)
    if is_file:
        reader = ipc.open_file(opened, options=options)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(opened, options=options)


def _line_texts(file: Path, column: str) -> Iterator[str]:
    """Yield the lines of a text file, whose only column is "text"."""
    _check_column(file, column, ["text"])
    for line in decoded_lines(file):
        yield line.removesuffix("\n").removesuffix("\r")


def _csv_texts(file: Path, column: str) -> Iterator[str]:
    # The limit belongs to the process; without it, a cell of more than 128 KiB is an error.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = (part for line in decoded_lines(file) for part in (_INNER_LINE_END.split(line) if "\r" in line else [line]))
    rows = csv.reader(chain(lines, [_END]), delimiter="\t" if table_suffix(file) == ".tsv" else ",")
    row = 0
    try:
        names = next(rows, [_END])
        if names == [_END]:
            raise ConfigError(f"{file} is empty, without the names of its columns; leave it out")
        _check_column(file, column, names)
        place = names.index(column)
        for cells in rows:
            if cells == [_END]:
                return
            # An empty line is no row.
            if cells:
                row += 1
                yield _cell(cells, place, names, f"row {row} of {file}")
    except csv.Error as error:
        raise ConfigError(f"row {row + 1} of {file} cannot be read ({error}); fix it") from None


def _cell(cells: list[str], place: int, names: list[str], location: str) -> str:
    if cells[-1].endswith(_END):
        raise ConfigError(f'{location} opens a quote (") that nothing closes; close it, or double quotes within a cell')
    if len(cells) > len(names):
        raise ConfigError(
            f"{location} has {len(cells)} cells, and the first line names {len(names)} columns; put cells with a "
            "separator into quotes"
        )
    if place >= len(cells):
        raise ConfigError(f"{location} has no cell of the column {names[place]!r}; fix or remove the row")
    return cells[place]


def _json_texts(file: Path, column: str) -> Iterator[str]:
    """Yield the texts of JSON lines, or of one document: a list of objects, an object, or lists of values by column."""
    first = next(_text_blocks(file), "").lstrip()
    is_document = table_suffix(file) == ".json" and not first.startswith("[")
    if is_document and not _is_json(first.partition("\n")[0]):
        yield from _object_texts(file, column)
    else:
        for record in jsonl_records(file):
            yield _json_text(record.fields, column, record.location)


def _json_text(fields: dict[str, Any], column: str, location: str) -> str:
    if column not in fields:
        raise ColumnError(f"data.column={column!r}: {location} has {unknown_column_message(column, fields)}")
    return column_text(fields, column, location)


def _is_json(text: str) -> bool:
    """Return whether the start of a file is JSON; a longer line than the start is a line of JSON lines, too."""
    try:
        parse_json(text)
    except ValueError:
        return len(text) >= _LONG_LINE_CHARACTERS
    return True


def _object_texts(file: Path, column: str) -> Iterator[str]:
    """Yield the texts of an object over several lines: one row, or lists of values by column."""
    stream = JsonStream(_text_blocks(file), file)
    fields = stream.value()
    if stream.peek() or not isinstance(fields, dict):
        raise ConfigError(f"{file} is neither JSON lines nor a list of objects; write one object a line")
    _check_column(file, column, list(fields))
    values = fields[column]
    for number, text in enumerate(values if isinstance(values, list) else [values], 1):
        yield _json_text({column: text}, column, f"row {number} of {file}")


def _text_blocks(file: Path) -> Iterator[str]:
    """Yield the text of a file in blocks."""
    with open_lines(file) as opened, translated_read_errors(file):
        yield from text_blocks(opened, file)
