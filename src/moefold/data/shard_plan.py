"""The input of a tokenisation cut into shards: by the input alone, so that the output is, too."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from moefold.bounded_read import LINE_BYTES, LongLineError, open_regular
from moefold.data.document import Corpus, Piece, TextFile, is_text
from moefold.data.jsonl import column_text, is_jsonl, jsonl_records, parse_line, unknown_column
from moefold.data.parquet_file import column_values, open_parquet
from moefold.data.path import existing_path, files_below, refuse_repeats
from moefold.errors import ConfigError

Form = Literal["text", "jsonl", "parquet"]
FORMS: tuple[Form, ...] = ("text", "jsonl", "parquet")
_BLOCK_BYTES = 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a file: bytes of JSON lines, row groups of parquet, or the whole of a text or compressed file."""

    path: Path
    form: Form
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What becomes one token file."""

    number: int
    portions: tuple[Portion, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of input."""
        return sum(portion.size_bytes for portion in self.portions)


def input_files(names: Sequence[str], form: str, out: Path) -> tuple[tuple[Path, Form], ...]:
    """The files that are named, folders recursively, each with its form; but nothing of the folder of the output.

    Args:
        names: files and folders.
        form: one of FORMS, or "auto": by a file's name, and text for names that say nothing.
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
    refuse_repeats(tuple(path.resolve() for path in paths))
    paths = [path for path in paths if path.stat().st_size and _is_input(path, form, is_named=path in roots)]
    if not paths:
        raise ConfigError(f"INPUT={names[0]!r} holds no file with anything in it; name text, JSON lines or parquet")
    return tuple((path, _form_of(path) if form == "auto" else cast(Form, form)) for path in paths)


def plan_shards(files: Sequence[tuple[Path, Form]], shard_bytes: int) -> tuple[Shard, ...]:
    """Cut files into shards of about so many bytes of input, in order; a document is never cut.

    Raises:
        ConfigError: a parquet file cannot be read.
    """
    shards: list[Shard] = []
    portions: list[Portion] = []
    filled = 0
    for path, form in files:
        for portion in _portions(path, form, shard_bytes):
            portions.append(portion)
            filled += portion.size_bytes
            if filled >= shard_bytes:
                shards.append(Shard(len(shards), tuple(portions)))
                portions, filled = [], 0
    if portions:
        shards.append(Shard(len(shards), tuple(portions)))
    return tuple(shards)


def portion_pieces(portion: Portion, column: str) -> Iterator[Piece]:
    """The documents of a portion, long texts in pieces; empty ones are left out.

    Raises:
        ConfigError: something cannot be read, is not text, or has not the column; file and line (row) are named.
    """
    try:
        yield from _documents(portion, column)
    except OSError as error:
        raise ConfigError(
            f"{portion.path} cannot be read ({error.strerror or error}); copy it anew or leave it out"
        ) from error
    except LongLineError as error:
        raise ConfigError(f"{portion.path}: {error}; cut it, or take it out") from None


def _documents(portion: Portion, column: str) -> Iterator[Piece]:
    if portion.form == "text":
        status = portion.path.stat()
        file = TextFile(portion.path, status.st_size, status.st_mtime_ns, is_named=True)
        yield from Corpus("text", (file,)).pieces()
        return
    documents = _parquet_documents if portion.form == "parquet" else _jsonl_documents
    for text, size_bytes in documents(portion, column):
        if text:
            yield Piece(text, ends_document=True, size_bytes=size_bytes)


def _is_input(path: Path, form: str, *, is_named: bool) -> bool:
    """Whether a file is to be read: one that is found in a folder, not named, and is no text is left out and named."""
    is_read_as_text = form == "text" or (form == "auto" and _form_of(path) == "text")
    if is_named or not is_read_as_text or is_text(path):
        return True
    logger.warning("left out %s, which is not text (it holds zero bytes)", path)
    return False


def _form_of(path: Path) -> Form:
    if path.suffix == ".parquet":
        return "parquet"
    return "jsonl" if is_jsonl(path) or path.suffix == ".json" else "text"


def _portions(path: Path, form: Form, shard_bytes: int) -> Iterator[Portion]:
    size_bytes = path.stat().st_size
    if form == "parquet":
        metadata = open_parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield Portion(path, form, group, group + 1, metadata.row_group(group).total_byte_size)
    elif form == "text" or path.suffix == ".gz":
        yield Portion(path, form, 0, size_bytes, size_bytes)
    else:
        # A line belongs to the portion that its first byte lies in.
        for start in range(0, size_bytes, shard_bytes):
            stop = min(start + shard_bytes, size_bytes)
            yield Portion(path, form, start, stop, stop - start)


def _jsonl_documents(portion: Portion, column: str) -> Iterator[tuple[str, int]]:
    if portion.path.suffix == ".gz":
        for record in jsonl_records(portion.path):
            # Progress counts the bytes of the compressed file, of which nobody knows which ones a line was.
            yield column_text(record.fields, column, record.place), 0
        return
    with open_regular(portion.path) as file:
        if portion.start:
            file.seek(portion.start - 1)
            _skip_line(file)
        while (at := file.tell()) < portion.stop and (line := file.readline(LINE_BYTES + 1)):
            if len(line) > LINE_BYTES:
                raise LongLineError(1 + _count_lines(portion.path, at), LINE_BYTES)
            try:
                text = _line_text(line, portion.path, 2 if at else 1, column)
            except ConfigError:
                # Only now is the number of the line worth reading the file for.
                _line_text(line, portion.path, 1 + _count_lines(portion.path, at), column)
                raise
            yield text, len(line)


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass


def _line_text(line: bytes, path: Path, number: int, column: str) -> str:
    record = parse_line(line, path, number)
    return column_text(record.fields, column, record.place) if record else ""


def _count_lines(path: Path, stop: int) -> int:
    """Line ends among the first `stop` bytes."""
    count = 0
    with open_regular(path) as file:
        while stop > 0 and (block := file.read(min(stop, _BLOCK_BYTES))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _parquet_documents(portion: Portion, column: str) -> Iterator[tuple[str, int]]:
    file = open_parquet(portion.path)
    if column not in file.schema_arrow.names:
        raise ConfigError(f"--column {column}: {portion.path} has {unknown_column(column, file.schema_arrow.names)}")
    groups = range(portion.start, portion.stop)
    num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
    for row, text in column_values(portion.path, column, groups):
        if not isinstance(text, str):
            what = "nothing" if text is None else type(text).__name__
            raise ConfigError(f"{portion.path}: column {column!r} holds {what}, not text, in row {row}")
        yield text, portion.size_bytes // num_rows
