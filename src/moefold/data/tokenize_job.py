"""Offline tokenisation (`moefold tokenize`): plan shards, write them in parallel, and resume after a kill.

Only the input determines the shards, so the output does not depend on the number of processes. A shard is complete or
absent, and has a document index next to it. `TOKENIZE_INFO_FILE` records the input and settings of a folder.
"""

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from moefold.bounded_read import (
    MAX_DESCRIPTION_BYTES,
    MAX_LINE_BYTES,
    LongLineError,
    check_regular_file,
    open_regular,
    read_json,
)
from moefold.data.conversations.conversation_tokens import SkippedRows
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.input_paths import COMPRESSION_SUFFIXES, check_no_duplicates, existing_path, files_below, is_jsonl
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
from moefold.data.token_cache import is_complete_array, write_tokens
from moefold.data.token_file import TOKENIZE_INFO_FILE, document_ends_path
from moefold.data.tokenizer import ByteTokenizer, OffsetTokenizer, refuse_nul, report_notes
from moefold.data.worker_pool import run_tasks
from moefold.errors import ConfigError
from moefold.file_lock import FileLock, open_lock_file
from moefold.progress import ReadProgress

InputFormat = Literal["text", "jsonl", "parquet"]
_BLOCK_BYTES = 2**20

logger = logging.getLogger(__name__)


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
        """Return a text if the tokenizer accepts it; else raise ConfigError."""
        refuse_nul(self.tokenizer, text, f"{location}: column {self.name!r}")
        return text

    def text(self, record: JsonlRecord | None) -> str:
        """Return the text of a record, "" of an empty line; raise ConfigError if it has no text."""
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
    """Return whether to read a file; binary files found in a folder are skipped with a warning."""
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


TMP_PATTERN = ".tokens-*.partial"


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Tokens and documents of a shard."""

    num_tokens: int
    num_documents: int
    num_skipped: int = 0
    """Lines and rows without text."""
    first_skipped: str = ""
    """Error of the first such line or row."""


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writer of tokenised shards; picklable and small, because worker processes load the tokenizer themselves."""

    out: Path
    tokenizer_name: str
    column: str
    skip_bad_rows: bool = False
    """If True, skip and count lines and rows without text."""

    def load_tokenizer(self) -> OffsetTokenizer:
        """Load the tokenizer: bytes or a tokenizer.json."""
        if self.tokenizer_name == "bytes":
            return ByteTokenizer()
        return JsonTokenizer(existing_path("--tokenizer", self.tokenizer_name))

    def find_finished(self, number: int) -> ShardSize | None:
        """Return the size of a finished shard, or None if it does not exist."""
        path = shard_path(self.out, number)
        index = document_ends_path(path)
        if not index.is_file() or not is_complete_array(path):
            return None
        skipped = _read_skipped(path)
        return ShardSize(len(np.load(path, mmap_mode="r")), index.stat().st_size // 8, *skipped)

    def write(self, shard: Shard, report: Callable[[int], None]) -> ShardSize:
        """Tokenise a shard to temporary files, and rename them, the index first. On an error no file of it remains.

        The bytes of input that were read since the last call are reported.
        """
        tokenizer = self.load_tokenizer()
        path = shard_path(self.out, shard.number)
        draft = self.out / f".{path.stem}.{uuid.uuid4().hex}.partial"
        index_draft = self.out / f".{path.stem}.{uuid.uuid4().hex}.index.partial"
        try:
            with draft.open("xb") as file, index_draft.open("xb") as index:
                skipped = SkippedRows(skips=self.skip_bad_rows)
                column = TextColumn(self.column, tokenizer)
                chunks = (piece for portion in shard.slices for piece in read_chunks(portion, column, skipped))
                counts = write_tokens(file, chunks, tokenizer, report, index)
                for opened in (file, index):
                    opened.flush()
                    os.fsync(opened.fileno())
            size = ShardSize(*counts, skipped.count, skipped.first)
            _skipped_path(path).unlink(missing_ok=True)
            if skipped.count:
                _skipped_path(path).write_text(json.dumps([skipped.count, skipped.first]), encoding="utf-8")
            index_draft.replace(document_ends_path(path))
            draft.replace(path)
        except ConnectionError:
            # The parent process that `report` sends to has ended.
            raise
        except OSError as error:
            raise unwritable_error(self.out, error) from error
        finally:
            draft.unlink(missing_ok=True)
            index_draft.unlink(missing_ok=True)
        return size


def unwritable_error(out: Path, error: OSError) -> ConfigError:
    """Return the error for an output folder that cannot be written."""
    return ConfigError(f"--out {out} cannot be written ({error.strerror or error}); choose another folder")


def shard_path(out: Path, number: int) -> Path:
    """Return the token file of a shard."""
    return out / f"tokens-{number:06d}.npy"


def _skipped_path(path: Path) -> Path:
    """Return the file with the skipped rows of a token file; it exists if rows were skipped."""
    return path.with_suffix(".skipped.json")


def _read_skipped(path: Path) -> tuple[int, str]:
    try:
        skipped = read_json(_skipped_path(path), MAX_LINE_BYTES)
    except FileNotFoundError:
        return 0, ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_skipped_path(path)} cannot be read ({error}); remove it with {path.name}") from None
    if not (isinstance(skipped, list) and [type(value) for value in skipped] == [int, str]):
        raise ConfigError(f"{_skipped_path(path)} is broken; remove it with {path.name}")
    return skipped[0], skipped[1]


FORMAT_VERSION = 2
"""Version of the record; version 1 identified a tokenizer by the bytes of its file."""
_MISMATCH_MESSAGES = {
    "format": "of another version of this program",
    "tokenizer": "another --tokenizer",
    "vocab_size": "another --tokenizer",
    "separator_id": "another --tokenizer",
    "column": "another --column",
    "skip_bad_rows": "another --skip-bad-rows",
    "shard_bytes": "another --shard-mb",
    "files": "other input files, or files that changed",
    "num_shards": "another number of shards",
}
"""Messages for keys of `TOKENIZE_INFO_FILE` that differ, in terms of the command line."""


@dataclass(frozen=True, slots=True)
class TokenizationResult:
    """Totals of a tokenisation."""

    num_documents: int
    num_tokens: int
    num_shards: int
    num_new_tokens: int
    """Tokens written by this call. The others were written by earlier, interrupted calls."""
    num_skipped: int
    """Lines and rows without text, including earlier calls."""
    first_skipped: str
    """Error of the first such line or row."""


def tokenize_files(
    inputs: Sequence[str], writer: ShardWriter, *, input_format: str, shard_bytes: int, num_processes: int
) -> TokenizationResult:
    """Tokenise files into a folder for data.kind="tokens".

    The shards and every byte of them depend on the input, the tokenizer and shard_bytes, not on the number of
    processes. A call with the same arguments resumes an interrupted one: finished shards stay.

    Args:
        input_format: format of the files: "text", "jsonl", "parquet", or "auto".
        shard_bytes: input bytes of one shard.

    Raises:
        ConfigError: the input cannot be used (the message has file and line), or the folder has other contents.
    """
    tokenizer = writer.load_tokenizer()
    report_notes(tokenizer)
    files = input_files(inputs, input_format, writer.out)
    if writer.skip_bad_rows and not any(kind != "text" for _, kind in files):
        raise ConfigError("--skip-bad-rows has no effect: all files are read as text, which has no rows; leave it out")
    shards = plan_shards(files, shard_bytes)
    info: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "column": writer.column,
        # Folders of earlier versions lack the key.
        "skip_bad_rows": writer.skip_bad_rows or None,
        "shard_bytes": shard_bytes,
        "files": [[str(path), kind, path.stat().st_size, path.stat().st_mtime_ns] for path, kind in files],
        "num_shards": len(shards),
    }
    with _lock_output_folder(writer.out):
        _check_same_job(writer.out, info)
        # For messages: the same tokenizer may have another path.
        info["tokenizer_name"] = writer.tokenizer_name
        _write_info(writer.out, info | {"is_complete": False})
        _remove_tmp_files(writer.out)
        done_shards = {
            shard.number: size for shard in shards if (size := writer.find_finished(shard.number)) is not None
        }
        new = _write_missing(writer, [shard for shard in shards if shard.number not in done_shards], num_processes)
        sizes = [size for _, size in sorted([*done_shards.items(), *new])]
        result = TokenizationResult(
            num_documents=sum(size.num_documents for size in sizes),
            num_tokens=sum(size.num_tokens for size in sizes),
            num_shards=len(shards),
            num_new_tokens=sum(size.num_tokens for _, size in new),
            num_skipped=sum(size.num_skipped for size in sizes),
            first_skipped=next((size.first_skipped for size in sizes if size.num_skipped), ""),
        )
        if not result.num_documents:
            _remove_shards(writer.out, shards)
            reason = result.first_skipped or "its rows and files are empty"
            raise ConfigError(f"no row of INPUT holds a text: {reason}; name the column by --column")
        totals = {"num_documents": result.num_documents, "num_tokens": result.num_tokens}
        _write_info(writer.out, info | totals | {"is_complete": True})
    return result


def _write_missing(writer: ShardWriter, shards: list[Shard], num_processes: int) -> list[tuple[int, ShardSize]]:
    total_bytes = sum(shard.size_bytes for shard in shards)
    try:
        with ReadProgress("Tokenising", total_bytes) as progress:
            sizes = run_tasks(writer.write, shards, num_processes, progress.advance)
            return [(shards[i].number, size) for i, size in sizes]
    finally:
        # Processes that are terminated when one fails leave temporary files.
        _remove_tmp_files(writer.out)


def _remove_shards(out: Path, shards: Sequence[Shard]) -> None:
    """Remove the files of shards and their description, so that a corrected command may write to the folder."""
    for shard in shards:
        path = shard_path(out, shard.number)
        for file in (path, document_ends_path(path), _skipped_path(path)):
            file.unlink(missing_ok=True)
    (out / TOKENIZE_INFO_FILE).unlink(missing_ok=True)


def _remove_tmp_files(out: Path) -> None:
    for draft in out.glob(TMP_PATTERN):
        draft.unlink()
    for skipped in out.glob("tokens-*.skipped.json"):
        if not skipped.with_name(skipped.name.replace(".skipped.json", ".npy")).exists():
            skipped.unlink()


@contextlib.contextmanager
def _lock_output_folder(out: Path) -> Iterator[None]:
    """Create the output folder and lock it; on exit, remove a new folder that got no shard."""
    is_new = not out.exists()
    had_lock = (out / ".lock").exists()
    with contextlib.ExitStack() as stack:
        if is_new:
            stack.callback(_remove_without_shards, out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(FileLock(open_lock_file(out / ".lock"))).try_acquire():
                raise ConfigError(f"--out {out} is being written by another `moefold tokenize`; wait for it")
            if not is_new and not had_lock:
                stack.callback(_remove_lock_of_others, out)
        except OSError as error:
            raise unwritable_error(out, error) from error
        # Errors of the input are ConfigErrors already, so an OSError comes from the output folder.
        try:
            yield
        except OSError as error:
            raise unwritable_error(out, error) from error


def _remove_lock_of_others(out: Path) -> None:
    """Remove the lock file from a folder that was refused because it holds other files."""
    if not (out / TOKENIZE_INFO_FILE).exists():
        (out / ".lock").unlink(missing_ok=True)


def _remove_without_shards(out: Path) -> None:
    if not out.is_dir() or any(out.glob("tokens-*.npy")):
        return
    for name in (TOKENIZE_INFO_FILE, f".{TOKENIZE_INFO_FILE}.partial", ".lock"):
        (out / name).unlink(missing_ok=True)
    # Fails if the folder has other files, which stay.
    with contextlib.suppress(OSError):
        out.rmdir()


def _check_same_job(out: Path, info: dict[str, Any]) -> None:
    try:
        stored = read_json(out / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except FileNotFoundError:
        if any(path.name != ".lock" for path in out.iterdir()):
            raise ConfigError(f"--out {out} is not empty and holds no tokens of this program; choose another") from None
        return
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(
            f"{out / TOKENIZE_INFO_FILE} is broken, so the input of its tokens is unknown; remove --out {out}"
        )
    if stored.get("is_complete") is not True and not any(out.glob("tokens-*.npy")):
        # A call that failed before its first shard does not restrict the input of this call.
        return
    changed = [key for key, value in info.items() if stored.get(key) != value]
    if changed:
        raise ConfigError(
            f"--out {out} holds tokens of other input or settings ({_MISMATCH_MESSAGES[changed[0]]}); choose another "
            "folder or remove it"
        )


def _write_info(out: Path, info: dict[str, Any]) -> None:
    draft = out / f".{TOKENIZE_INFO_FILE}.partial"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(info, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(out / TOKENIZE_INFO_FILE)
