"""The input of a tokenisation cut into shards: by the input alone, so that the output is, too."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from moefold.bounded_read import MAX_LINE_BYTES, LongLineError, open_regular
from moefold.data.document import Corpus, TextChunk, TextFile, is_text
from moefold.data.jsonl import column_text, is_jsonl, jsonl_records, parse_line, unknown_column_message
from moefold.data.parquet_file import column_values, open_parquet
from moefold.data.path import check_no_duplicates, existing_path, files_below
from moefold.errors import ConfigError

InputFormat = Literal["text", "jsonl", "parquet"]
INPUT_FORMATS: tuple[InputFormat, ...] = ("text", "jsonl", "parquet")
_BLOCK_BYTES = 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InputSlice:
    """A part of a file: bytes of JSON lines, row groups of parquet, or the whole of a text or compressed file."""

    path: Path
    input_format: InputFormat
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What becomes one token file."""

    number: int
    slices: tuple[InputSlice, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of input."""
        return sum(portion.size_bytes for portion in self.slices)


def input_files(names: Sequence[str], input_format: str, out: Path) -> tuple[tuple[Path, InputFormat], ...]:
    """The files that are named, folders recursively, each with its form; but nothing of the folder of the output.

    Args:
        names: files and folders.
        input_format: one of FORMS, or "auto": by a file's name, and text for names that say nothing.
        out: where the tokens go.

    Raises:
        ConfigError: a name does not exist, comes twice or is part of the output, or there is no file with anything in
            it.
    """
    roots = [existing_path("INPUT", name) for name in names]
    own = out.resolve()
    if inside := [root for root in roots if root.is_relative_to(own)]:
        raise ConfigError(f"INPUT {inside[0]} lies in --out {out}, where the tokens go; choose another folder for them")
    paths = [file for root in roots for file in files_below(root) if not file.resolve().is_relative_to(own)]
    check_no_duplicates(tuple(path.resolve() for path in paths))
    paths = [path for path in paths if path.stat().st_size and _is_input(path, input_format, is_named=path in roots)]
    if not paths:
        raise ConfigError(f"INPUT={names[0]!r} holds no file with anything in it; name text, JSON lines or parquet")
    return tuple(
        (path, _detect_format(path) if input_format == "auto" else cast(InputFormat, input_format)) for path in paths
    )


def plan_shards(files: Sequence[tuple[Path, InputFormat]], shard_bytes: int) -> tuple[Shard, ...]:
    """Cut files into shards of about so many bytes of input, in order; a document is never cut.

    Raises:
        ConfigError: a parquet file cannot be read.
    """
    shards: list[Shard] = []
    portions: list[InputSlice] = []
    filled = 0
    for path, form in files:
        for portion in _split_file(path, form, shard_bytes):
            portions.append(portion)
            filled += portion.size_bytes
            if filled >= shard_bytes:
                shards.append(Shard(len(shards), tuple(portions)))
                portions, filled = [], 0
    if portions:
        shards.append(Shard(len(shards), tuple(portions)))
    return tuple(shards)


def read_chunks(input_slice: InputSlice, column: str) -> Iterator[TextChunk]:
    """The documents of a portion, long texts in pieces; empty ones are left out.

    Raises:
        ConfigError: something cannot be read, is not text, or has not the column; file and line (row) are named.
    """
    try:
        yield from _documents(input_slice, column)
    except OSError as error:
        raise ConfigError(
            f"{input_slice.path} cannot be read ({error.strerror or error}); copy it anew or leave it out"
        ) from error
    except LongLineError as error:
        raise ConfigError(f"{input_slice.path}: {error}; cut it, or take it out") from None


def _documents(input_slice: InputSlice, column: str) -> Iterator[TextChunk]:
    if input_slice.input_format == "text":
        status = input_slice.path.stat()
        file = TextFile(input_slice.path, status.st_size, status.st_mtime_ns, is_named=True)
        yield from Corpus("text", (file,)).chunks()
        return
    documents = _parquet_documents if input_slice.input_format == "parquet" else _jsonl_documents
    for text, size_bytes in documents(input_slice, column):
        if text:
            yield TextChunk(text, ends_document=True, size_bytes=size_bytes)


def _is_input(path: Path, input_format: str, *, is_named: bool) -> bool:
    """Whether a file is to be read: one that is found in a folder, not named, and is no text is left out and named."""
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
    elif input_format == "text" or path.suffix == ".gz":
        yield InputSlice(path, input_format, 0, size_bytes, size_bytes)
    else:
        # A line belongs to the portion that its first byte lies in.
        for start in range(0, size_bytes, shard_bytes):
            stop = min(start + shard_bytes, size_bytes)
            yield InputSlice(path, input_format, start, stop, stop - start)


def _jsonl_documents(input_slice: InputSlice, column: str) -> Iterator[tuple[str, int]]:
    if input_slice.path.suffix == ".gz":
        for record in jsonl_records(input_slice.path):
            # Progress counts the bytes of the compressed file, of which nobody knows which ones a line was.
            yield column_text(record.fields, column, record.location), 0
        return
    with open_regular(input_slice.path) as file:
        if input_slice.start:
            file.seek(input_slice.start - 1)
            _skip_line(file)
        while (at := file.tell()) < input_slice.stop and (line := file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                raise LongLineError(1 + _count_lines(input_slice.path, at), MAX_LINE_BYTES)
            try:
                text = _line_text(line, input_slice.path, 2 if at else 1, column)
            except ConfigError:
                # Only now is the number of the line worth reading the file for.
                _line_text(line, input_slice.path, 1 + _count_lines(input_slice.path, at), column)
                raise
            yield text, len(line)


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass


def _line_text(line: bytes, path: Path, number: int, column: str) -> str:
    record = parse_line(line, path, number)
    return column_text(record.fields, column, record.location) if record else ""


def _count_lines(path: Path, stop: int) -> int:
    """Line ends among the first `stop` bytes."""
    count = 0
    with open_regular(path) as file:
        while stop > 0 and (block := file.read(min(stop, _BLOCK_BYTES))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _parquet_documents(input_slice: InputSlice, column: str) -> Iterator[tuple[str, int]]:
    file = open_parquet(input_slice.path)
    if column not in file.schema_arrow.names:
        raise ConfigError(
            f"--column {column}: {input_slice.path} has {unknown_column_message(column, file.schema_arrow.names)}"
        )
    groups = range(input_slice.start, input_slice.stop)
    num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    for row, text in column_values(input_slice.path, column, groups):
        if not isinstance(text, str):
            what = "nothing" if text is None else type(text).__name__
            raise ConfigError(f"{input_slice.path}: column {column!r} holds {what}, not text, in row {row}")
        yield text, input_slice.size_bytes // num_rows
