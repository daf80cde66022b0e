"""A whole tokenisation: plan, shards, and a note of what they were made from, so that it can go on after a kill."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.bounded_read import MAX_DESCRIPTION_BYTES, read_json
from moefold.data.progress import ReadProgress
from moefold.data.shard_plan import Shard, input_files, plan_shards
from moefold.data.shard_writer import TMP_PATTERN, ShardSize, ShardWriter, unwritable_error
from moefold.data.token_file import TOKENIZE_INFO_FILE
from moefold.data.worker_pool import run_tasks
from moefold.errors import ConfigError

FORMAT_VERSION = 1
_MISMATCH_MESSAGES = {
    "format": "of another version of this program",
    "tokenizer": "another --tokenizer",
    "vocab_size": "another --tokenizer",
    "separator_id": "another --tokenizer",
    "column": "another --column",
    "shard_bytes": "another --shard-mb",
    "files": "other input files, or files that changed",
    "num_shards": "another number of shards",
}
"""What a note says otherwise, in the words of the command line."""


@dataclass(frozen=True, slots=True)
class TokenizationResult:
    """What came of it."""

    num_documents: int
    num_tokens: int
    num_shards: int
    num_new_tokens: int
    """Tokens that this call made, and no earlier one that was stopped."""


def tokenize_files(
    inputs: Sequence[str], writer: ShardWriter, *, input_format: str, shard_bytes: int, num_processes: int
) -> TokenizationResult:
    """Tokenise files into a folder that data.kind="tokens" reads.

    The shards and every byte of them depend on the input, the tokenizer and shard_bytes, not on the number of
    processes. A call that was stopped is taken up by the next one with the same arguments: finished shards stay.

    Args:
        inputs: files and folders.
        writer: the folder, the tokenizer and the column.
        input_format: of the files: "text", "jsonl", "parquet", or "auto".
        shard_bytes: input of one shard.
        num_processes: processes at once.

    Raises:
        ConfigError: the input cannot be used (file and line are named), or the folder holds something else.
    """
    tokenizer = writer.load_tokenizer()
    files = input_files(inputs, input_format, writer.out)
    shards = plan_shards(files, shard_bytes)
    note: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "column": writer.column,
        "shard_bytes": shard_bytes,
        "files": [[str(path), kind, path.stat().st_size, path.stat().st_mtime_ns] for path, kind in files],
        "num_shards": len(shards),
    }
    with _lock_output_folder(writer.out):
        _check_same_job(writer.out, note)
        _write_info(writer.out, note | {"is_complete": False})
        _remove_tmp_files(writer.out)
        done = {shard.number: size for shard in shards if (size := writer.find_finished(shard.number)) is not None}
        new = _write_missing(writer, [shard for shard in shards if shard.number not in done], num_processes)
        sizes = [*done.values(), *new]
        result = TokenizationResult(
            num_documents=sum(size.num_documents for size in sizes),
            num_tokens=sum(size.num_tokens for size in sizes),
            num_shards=len(shards),
            num_new_tokens=sum(size.num_tokens for size in new),
        )
        totals = {"num_documents": result.num_documents, "num_tokens": result.num_tokens}
        _write_info(writer.out, note | totals | {"is_complete": True})
    return result


def _write_missing(writer: ShardWriter, shards: list[Shard], num_processes: int) -> list[ShardSize]:
    total_bytes = sum(shard.size_bytes for shard in shards)
    try:
        with ReadProgress("Tokenising", total_bytes) as progress:
            return [size for _, size in run_tasks(writer.write, shards, num_processes, progress.advance)]
    finally:
        # Processes that are ended when one fails leave theirs.
        _remove_tmp_files(writer.out)


def _remove_tmp_files(out: Path) -> None:
    for draft in out.glob(TMP_PATTERN):
        draft.unlink()


@contextlib.contextmanager
def _lock_output_folder(out: Path) -> Iterator[None]:
    """Make the folder and keep others from writing to it; one that was made here and got no shard goes again."""
    is_new = not out.exists()
    with contextlib.ExitStack() as stack:
        if is_new:
            stack.callback(_remove_without_shards, out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((out / ".lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out} is being written by another `moefold tokenize`; wait for it") from None
        except OSError as error:
            raise unwritable_error(out, error) from error
        # What is read names its own faults, so this is the folder's.
        try:
            yield
        except OSError as error:
            raise unwritable_error(out, error) from error


def _remove_without_shards(out: Path) -> None:
    if not out.is_dir() or any(out.glob("tokens-*.npy")):
        return
    for name in (TOKENIZE_INFO_FILE, f".{TOKENIZE_INFO_FILE}.partial", ".lock"):
        (out / name).unlink(missing_ok=True)
    # Whatever else is there is not ours.
    with contextlib.suppress(OSError):
        out.rmdir()


def _check_same_job(out: Path, info: dict[str, Any]) -> None:
    try:
        found = read_json(out / TOKENIZE_INFO_FILE, MAX_DESCRIPTION_BYTES)
    except FileNotFoundError:
        if any(path.name != ".lock" for path in out.iterdir()):
            raise ConfigError(f"--out {out} is not empty and holds no tokens of this program; choose another") from None
        return
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{out / TOKENIZE_INFO_FILE} is broken, so nobody knows what the tokens are of; remove --out {out}"
        )
    if found.get("is_complete") is not True and not any(out.glob("tokens-*.npy")):
        # A call that failed before its first shard binds nobody to its input.
        return
    wrong = [key for key, value in info.items() if found.get(key) != value]
    if wrong:
        raise ConfigError(
            f"--out {out} holds tokens of other input or settings ({_MISMATCH_MESSAGES[wrong[0]]}); choose another folder or "
            "remove it"
        )


def _write_info(out: Path, info: dict[str, Any]) -> None:
    draft = out / f".{TOKENIZE_INFO_FILE}.partial"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(info, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(out / TOKENIZE_INFO_FILE)
