"""Texts of one column of a table file (parquet, arrow, CSV, TSV, JSON lines, a JSON array), or of a text file by line.

Text stays text: a cell is never interpreted as a number, a date or a missing value. Files are read in parts of bounded
size, and every error names the file and the row.
"""

import csv
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from moefold.bounded_read import (
    MAX_CONFIG_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_LINE_BYTES,
    parse_json,
    read_json,
    read_text,
)
from moefold.data.input_paths import CONFIG_FILE, files_below, table_suffix
from moefold.data.sources.file_formats import (
    ColumnError,
    JsonStream,
    column_text,
    column_values,
    decoded_lines,
    import_pyarrow,
    jsonl_records,
    open_lines,
    open_parquet,
    open_seekable,
    python_values,
    text_blocks,
    translated_read_errors,
    unknown_column_message,
)
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting, closest_match, first_line

logger = logging.getLogger(__name__)

TABLE_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of files that are tables by themselves."""
FOLDER_SUFFIXES = (*TABLE_SUFFIXES, ".txt")
"""Suffixes of files in a folder: the lines of a text file are rows, as in the package `datasets`."""
_SLICE_ROWS = 1024
_END = "\0end of file"
"""Line appended to a CSV file: it is a separate row, unless a quote is still open."""
_INNER_LINE_END = re.compile(r"(?<=\r)(?!\n)")
_LONG_LINE_CHARACTERS = 1 << 18
"""Characters after which a first line may continue beyond the first block of a file."""


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
            kind = "nothing" if value is None else type(value).__name__
            raise ColumnError(
                f"data.column={column!r} of {file} holds {kind}, not text, in row {row + 1}; name a column of text, or "
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
            for chunk in _arrow_parts(opened, file, column):
                if row + len(chunk) > start:
                    values = python_values(chunk, file, column, row)
                    yield from ((row + i, value) for i, value in enumerate(values) if row + i >= start)
                row += len(chunk)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{file} is damaged after row {row} ({first_line(error)}); copy it again or leave it out"
        ) from error


def _arrow_parts(opened: Any, file: Path, column: str) -> Iterator[Any]:
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
    # The limit applies to the process; by default, a cell of more than 128 KiB is an error.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = (text for line in decoded_lines(file) for text in (_INNER_LINE_END.split(line) if "\r" in line else [line]))
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
            # An empty line is not a row.
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
        return
    for number, record in enumerate(jsonl_records(file)):
        if is_document and not number and isinstance(record.fields.get(column), list):
            # Lists by column on one line.
            yield from _object_texts(file, column)
            return
        yield _json_text(record.fields, column, record.location)


def _json_text(fields: dict[str, Any], column: str, location: str) -> str:
    if column not in fields:
        raise ColumnError(f"data.column={column!r}: {location} has {unknown_column_message(column, fields)}")
    return column_text(fields, column, location)


def _is_json(text: str) -> bool:
    """Return whether the start of a file is JSON. A line that is longer than the start is a line of JSON lines."""
    try:
        parse_json(text)
    except ValueError:
        return len(text) >= _LONG_LINE_CHARACTERS
    return True


def _object_texts(file: Path, column: str) -> Iterator[str]:
    """Yield the texts of a file with one object: one row, or lists of values by column."""
    stream = JsonStream(_text_blocks(file), file)
    fields = stream.value()
    if stream.peek() or not isinstance(fields, dict):
        raise ConfigError(f"{file} is neither JSON lines nor a list of objects; write one object a line")
    _check_column(file, column, list(fields))
    values = fields[column]
    for number, text in enumerate(values if isinstance(values, list) else [values], 1):
        yield _json_text({column: text}, column, f"row {number} of {file}")


def _text_blocks(file: Path) -> Iterator[str]:
    with open_lines(file) as opened, translated_read_errors(file):
        yield from text_blocks(opened, file)


SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
METADATA_FILES = (*SAVED_DATASET_FILES, "dataset_info.json", "dataset_infos.json")
_CARD = "README.md"
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL)
_CONFIG_KEYS = frozenset({"config_name", "data_files", "data_dir", "default", "description", "version", "features"})
"""Keys of a configuration. Other keys are options of a reader of the package."""
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")


def check_rows_readable(file: Path, column: str) -> None:
    """Read all rows of a file. Errors are as for `text_rows`."""
    if table_suffix(file) in FOLDER_SUFFIXES and file.name not in METADATA_FILES:
        for _ in text_rows(file, column):
            pass


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder is a data set that `save_to_disk` wrote."""
    return any((path / name).is_file() for name in SAVED_DATASET_FILES)


def split_files(folder: Path, split: str, subset: str) -> list[Path]:
    """Return the files of a split of a folder, in order.

    The subset is a configuration of its README.md. Empty means the default one. Raises ConfigError if there is no such
    split or configuration, or it has no tables.
    """
    if is_saved_dataset(folder):
        return _saved_files(folder, split)
    names = sorted(str(file.relative_to(folder)) for file in files_below(folder) if _is_listed(file, folder))
    by_split = _configured_files(folder, names, subset)
    if by_split is None:
        if subset:
            raise ConfigError(f"data.subset={subset!r}: the {_CARD} of {folder} names no configurations; leave it out")
        by_split = _named_splits(names)
    _check_split(split, by_split, folder)
    return [folder / name for name in _files_of_one_format(by_split[split], folder)]


def _is_listed(file: Path, folder: Path) -> bool:
    """Return whether a file may be data: it does not describe a data set, and is not in a folder such as __MACOSX."""
    inside = file.relative_to(folder).parent.parts
    return file.name not in (*METADATA_FILES, _CARD, CONFIG_FILE) and not any(name.startswith("__") for name in inside)


def _check_split(split: str, splits: Mapping[str, Any], folder: Path) -> None:
    if split not in splits:
        guess = closest_match(split, splits)
        hint = f"did you mean {guess!r}?" if guess else f"the splits are {', '.join(sorted(splits)) or 'none'}"
        raise ConfigError(Problem("data.split", split, f"is not in {folder}", hint))


def _saved_files(folder: Path, split: str) -> list[Path]:
    try:
        if (folder / "dataset_dict.json").is_file():
            _check_split(split, {str(name): None for name in _read(folder / "dataset_dict.json")["splits"]}, folder)
            folder = folder / split
        state = _read(folder / "state.json")
        if state.get("_indices_data_files"):
            raise ConfigError(f"{folder} is a selection of rows, saved by an old version of datasets; save it again")
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder} is not a complete saved data set ({reason}); copy it again") from error


def _read(file: Path) -> Any:
    return read_json(file, MAX_DESCRIPTION_BYTES)


def _files_of_one_format(names: Sequence[str], folder: Path) -> list[str]:
    """Return the files of the most frequent format."""
    formats = Counter(table_suffix(Path(name)) for name in names)
    tables = [(count, suffix) for suffix, count in formats.items() if suffix in FOLDER_SUFFIXES]
    if not tables:
        suffixes = ", ".join(sorted(suffix or "no suffix" for suffix in formats)) or "none"
        raise ConfigError(f"{folder} has no file in {', '.join(FOLDER_SUFFIXES)} for this split (found: {suffixes})")
    largest = max(tables)[0]
    best = [suffix for count, suffix in tables if count == largest]
    # A description such as stats.json may be next to the only file with text.
    best = [suffix for suffix in best if suffix not in (".json", ".txt")] or best
    if len(best) > 1:
        raise ConfigError(
            f"{folder} has as many files in {best[0]} as in {best[1]} for this split; name the files in "
            f"{Setting('data.path')}"
        )
    if left_out := [name for name in names if table_suffix(Path(name)) != best[0]]:
        suffix = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        logger.warning(f"{Setting('data.path')}: %s is read in %s; left out %s%s", folder, best[0], left_out[0], suffix)
    return [name for name in names if table_suffix(Path(name)) == best[0]]


def _named_splits(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by the rules of `datasets` for folders without configurations."""
    from datasets import data_files

    by_split: dict[str, list[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            by_split.setdefault(match[1], []).append(name)
    if by_split:
        return by_split
    for patterns in data_files.ALL_DEFAULT_PATTERNS:
        by_split = {str(split): _matching(names, pattern) for split, pattern in patterns.items()}
        if by_split := {split: files for split, files in by_split.items() if files}:
            return by_split
    return {}


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match some patterns, in the order of the patterns."""
    from fsspec.utils import glob_translate

    matched: dict[str, None] = {}
    for pattern in patterns:
        # A file with exactly this name takes precedence over a pattern.
        matches = re.compile(glob_translate(pattern)).match
        matched |= dict.fromkeys([pattern] if pattern in names else [name for name in names if matches(name)])
    return list(matched)


def _configured_files(folder: Path, names: Sequence[str], subset: str) -> dict[str, list[str]] | None:
    """Return the files of each split of a configuration of README.md, or None if there is no such configuration."""
    configs = _configurations(folder)
    if not configs:
        return None
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    defaults = [name for name, config in by_name.items() if config.get("default") or name == "default"]
    if not subset and len(by_name) == 1:
        defaults = list(by_name)
    config_name = subset or next(iter(defaults), "")
    if config_name not in by_name:
        fault = f"data.subset={subset!r} is none of" if subset else "data.subset is empty, and must be one of"
        raise ConfigError(f"{fault} the configurations of {folder}: {', '.join(by_name)}")
    config = by_name[config_name]
    if unread := sorted(map(str, config.keys() - _CONFIG_KEYS)):
        raise ConfigError(
            f"the {_CARD} of {folder} sets {unread[0]!r} for its reader, which has no effect here; name the files in "
            f"{Setting('data.path')}"
        )
    below = str(config.get("data_dir", "")).removeprefix("./").rstrip("/")
    prefix = f"{below}/" if below else ""
    inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    by_split = (
        _files_of_patterns(config["data_files"], inner, folder) if "data_files" in config else _named_splits(inner)
    )
    return {split: [prefix + name for name in files] for split, files in by_split.items()}


def _files_of_patterns(patterns: Any, names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    from datasets import data_files

    try:
        sanitized = data_files.sanitize_patterns(patterns)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the {_CARD} of {folder} has data_files that are not understood ({error})") from error
    return {str(split): _matching(names, [str(p).removeprefix("./") for p in few]) for split, few in sanitized.items()}


def _configurations(folder: Path) -> list[dict[str, Any]]:
    """Return the configurations that the front matter of README.md lists."""
    try:
        match = _FRONT_MATTER.match(read_text(folder / _CARD, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / _CARD} cannot be read ({error}); fix or remove it") from error
    if match is None:
        return []
    import yaml  # type: ignore[import-untyped]

    try:
        fields = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise ConfigError(f"{folder / _CARD} has no YAML between its lines '---'; fix or remove it") from error
    configs = fields.get("configs", []) if isinstance(fields, dict) else []
    if not isinstance(configs, list) or not all(isinstance(config, dict) for config in configs):
        raise ConfigError(f"{folder / _CARD}: configs must be a list of configurations; fix it")
    return configs
