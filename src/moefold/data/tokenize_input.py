"""Input of `moefold tokenize`: its files in shards of about equal size, and the documents of a shard."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from moefold.bounded_read import MAX_LINE_BYTES, LongLineError, check_regular_file, open_regular
from moefold.data.conversations.conversation_tokens import SkippedRows
from moefold.data.input_paths import (
    COMPRESSION_SUFFIXES,
    check_no_duplicates,
    existing_path,
    files_below,
    is_jsonl,
    refuse_data_set,
)
from moefold.data.sources.file_formats import (
    JsonlRecord,
    column_text,
    column_values,
    is_json_array,
    jsonl_records,
    open_parquet,
    parse_line,
    unknown_column_message,
)
from moefold.data.sources.text_source import Corpus, TextChunk, TextFile, is_text
from moefold.data.tokenizer import OffsetTokenizer, refuse_nul
from moefold.errors import ConfigError

logger = logging.getLogger(__name__)

InputFormat = Literal["text", "jsonl", "parquet"]
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class InputSlice:
    """Part of a file: a byte range of JSON lines, row groups of parquet, or a whole text or compressed file."""

    path: Path
    input_format: InputFormat
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The input of one token file."""

    number: int
    slices: tuple[InputSlice, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of input."""
        return sum(portion.size_bytes for portion in self.slices)


def input_files(names: Sequence[str], input_format: str, out: Path) -> tuple[tuple[Path, InputFormat], ...]:
    """Return the named files, folders recursively, each with its format, except the output folder.

    The format "auto" goes by the file's suffix, text if it is unknown.

    Raises:
        ConfigError: a name does not exist, is given twice or is part of the output, or all files are empty.
    """
    roots = [existing_path("INPUT", name) for name in names]
    target = out.resolve()
    if inside := [root for root in roots if root.is_relative_to(target)]:
        raise ConfigError(f"INPUT {inside[0]} lies in --out {out}, where the tokens go; choose another folder for them")
    paths = [file for root in roots for file in files_below(root) if not file.resolve().is_relative_to(target)]
    check_no_duplicates(tuple(path.resolve() for path in paths))
    for root in roots:
        refuse_data_set("INPUT", root)
        try:
            if not root.is_dir():
                check_regular_file(root)
        except OSError as error:
            raise ConfigError(f"INPUT={str(root)!r} cannot be read: {error.strerror}") from None
    paths = [path for path in paths if path.stat().st_size and _is_input(path, input_format, is_named=path in roots)]
    if not paths:
        raise ConfigError(f"INPUT={names[0]!r} holds no file with anything in it; name text, JSON lines or parquet")
    return tuple(
        (path, _detect_format(path) if input_format == "auto" else cast(InputFormat, input_format)) for path in paths
    )


def plan_shards(files: Sequence[tuple[Path, InputFormat]], shard_bytes: int) -> tuple[Shard, ...]:
    """Split files into shards of about `shard_bytes` of input, in order. Documents are never split."""
    shards: list[Shard] = []
    portions: list[InputSlice] = []
    filled = 0
    for path, form in files:
        for portion in _split_file(path, form, shard_bytes):
            portions.append(portion)
            filled += portion.size_bytes
            if filled >= shard_bytes:
                shards.append(Shard(len(shards), tuple(portions)))
                portions = []
                filled = 0
    if portions:
        shards.append(Shard(len(shards), tuple(portions)))
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The column of the texts of rows."""

    name: str
    tokenizer: OffsetTokenizer

    def check(self, text: str, location: str) -> str:
        """Return a text if the tokenizer accepts it. Raises ConfigError if not."""
        refuse_nul(self.tokenizer, text, f"{location}: column {self.name!r}")
        return text

    def text(self, record: JsonlRecord | None) -> str:
        """Return the text of a record, or "" of an empty line. Raises ConfigError if it has no text."""
        return self.check(column_text(record.fields, self.name, record.location), record.location) if record else ""


def read_chunks(input_slice: InputSlice, column: TextColumn, skipped: SkippedRows) -> Iterator[TextChunk]:
    """Yield the non-empty documents of a slice, long texts in chunks.

    Raises:
        ConfigError: the input cannot be read, is not text, or lacks the column. The message has file and line (row).
    """
    try:
        yield from _documents(input_slice, column, skipped)
    except OSError as error:
        raise ConfigError(
            f"{input_slice.path} cannot be read ({error.strerror or error}); copy it again or leave it out"
        ) from error
    except LongLineError as error:
        raise ConfigError(f"{input_slice.path}: {error}; split or remove it") from None


def _documents(input_slice: InputSlice, column: TextColumn, skipped: SkippedRows) -> Iterator[TextChunk]:
    if input_slice.input_format == "text":
        status = input_slice.path.stat()
        file = TextFile(input_slice.path, status.st_size, status.st_mtime_ns, is_named=True)
        yield from Corpus("text", (file,)).chunks()
        return
    documents = _parquet_documents if input_slice.input_format == "parquet" else _jsonl_documents
    for text, size_bytes in documents(input_slice, column, skipped):
        if text:
            yield TextChunk(text, ends_document=True, size_bytes=size_bytes)


def _is_input(path: Path, input_format: str, *, is_named: bool) -> bool:
    """Return whether to read a file. Binary files found in a folder are skipped with a warning."""
    is_read_as_text = input_format == "text" or (input_format == "auto" and _detect_format(path) == "text")
    if is_named or not is_read_as_text or is_text(path):
        return True
    logger.warning("left out %s, which is not text (it holds zero bytes)", path)
    return False


def _detect_format(path: Path) -> InputFormat:
    if path.suffix == ".parquet":
        return "parquet"
    return "jsonl" if is_jsonl(path) or path.suffix == ".json" else "text"


def _split_file(path: Path, input_format: InputFormat, shard_bytes: int) -> Iterator[InputSlice]:
    size_bytes = path.stat().st_size
    if input_format == "parquet":
        metadata = open_parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield InputSlice(path, input_format, group, group + 1, metadata.row_group(group).total_byte_size)
    elif input_format == "text" or _has_one_slice(path):
        yield InputSlice(path, input_format, 0, size_bytes, size_bytes)
    else:
        # A line belongs to the slice that contains its first byte.
        for start in range(0, size_bytes, shard_bytes):
            stop = min(start + shard_bytes, size_bytes)
            yield InputSlice(path, input_format, start, stop, stop - start)


def _has_one_slice(path: Path) -> bool:
    """Return whether a JSON file cannot be read from the middle, because it is compressed or one JSON array."""
    return path.suffix in COMPRESSION_SUFFIXES or is_json_array(path)


def _jsonl_documents(input_slice: InputSlice, column: TextColumn, skipped: SkippedRows) -> Iterator[tuple[str, int]]:
    path = input_slice.path
    if _has_one_slice(path):
        # Progress counts compressed bytes, which cannot be attributed to lines.
        is_compressed = path.suffix in COMPRESSION_SUFFIXES
        for record in jsonl_records(path, skipped.refuse):
            try:
                yield column.text(record), 0 if is_compressed else record.size_bytes
            except ConfigError as error:
                skipped.refuse(error)
        return
    with open_regular(path) as file:
        if input_slice.start:
            file.seek(input_slice.start - 1)
            while (block := file.readline(_BLOCK_BYTES)) and not block.endswith(b"\n"):
                pass
        while (offset := file.tell()) < input_slice.stop and (line := file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                raise LongLineError(1 + _count_lines(path, offset), MAX_LINE_BYTES)
            try:
                text = column.text(parse_line(line, path, 2 if offset else 1))
            except ConfigError as error:
                # Only the message needs the line number, which requires reading the file.
                skipped.refuse(error if skipped.count else _numbered_error(line, path, offset, column))
                continue
            yield text, len(line)


def _numbered_error(line: bytes, path: Path, offset: int, column: TextColumn) -> ConfigError:
    """Return the error of a line that begins at byte `offset`, with the number of the line."""
    try:
        column.text(parse_line(line, path, 1 + _count_lines(path, offset)))
    except ConfigError as error:
        return error
    raise AssertionError("the line has an error")


def _count_lines(path: Path, stop: int) -> int:
    """Return the number of line ends among the first `stop` bytes."""
    count = 0
    with open_regular(path) as file:
        while stop > 0 and (block := file.read(min(stop, _BLOCK_BYTES))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _parquet_documents(input_slice: InputSlice, column: TextColumn, skipped: SkippedRows) -> Iterator[tuple[str, int]]:
    file = open_parquet(input_slice.path)
    name = column.name
    if name not in file.schema_arrow.names:
        raise ConfigError(
            f"--column {name}: {input_slice.path} has {unknown_column_message(name, file.schema_arrow.names)}"
        )
    groups = range(input_slice.start, input_slice.stop)
    num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    for row, value in column_values(input_slice.path, name, groups):
        try:
            text = _row_text(value, f"{input_slice.path}, row {row}", column)
        except ConfigError as error:
            skipped.refuse(error)
        else:
            yield text, input_slice.size_bytes // num_rows


def _row_text(value: Any, location: str, column: TextColumn) -> str:
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"{location}: column {column.name!r} holds {kind}, not text")
    return column.check(value, location)
