"""Offline tokenisation (`moefold tokenize`): write the shards of an input in parallel, and resume after a kill.

Only the input determines the shards, so the output does not depend on the number of processes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.data.shard_writer import ShardSize, ShardWriter, unwritable_error
from moefold.data.tokenize_input import Shard, input_files, plan_shards
from moefold.data.tokenize_record import FORMAT_VERSION, TOKENIZE_INFO_FILE, check_same_job, write_tokenize_info
from moefold.data.tokenizer import report_notes
from moefold.data.worker_pool import run_tasks
from moefold.errors import ConfigError
from moefold.file_lock import FileLock, open_lock_file
from moefold.progress import ReadProgress


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
        check_same_job(writer.out, info)
        # For messages: the same tokenizer may have another path.
        info["tokenizer_name"] = writer.tokenizer_name
        write_tokenize_info(writer.out, info | {"is_complete": False})
        writer.remove_drafts()
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
            # A corrected command may write to the folder.
            for shard in shards:
                writer.remove(shard.number)
            (writer.out / TOKENIZE_INFO_FILE).unlink(missing_ok=True)
            reason = result.first_skipped or "its rows and files are empty"
            raise ConfigError(f"no row of INPUT holds a text: {reason}; name the column by --column")
        totals = {"num_documents": result.num_documents, "num_tokens": result.num_tokens}
        write_tokenize_info(writer.out, info | totals | {"is_complete": True})
    return result


def _write_missing(writer: ShardWriter, shards: list[Shard], num_processes: int) -> list[tuple[int, ShardSize]]:
    total_bytes = sum(shard.size_bytes for shard in shards)
    try:
        with ReadProgress("Tokenising", total_bytes) as progress:
            sizes = run_tasks(writer.write, shards, num_processes, progress.advance)
            return [(shards[i].number, size) for i, size in sizes]
    finally:
        # Processes that are terminated when one fails leave temporary files.
        writer.remove_drafts()


@contextlib.contextmanager
def _lock_output_folder(out: Path) -> Iterator[None]:
    """Create the output folder and lock it. On exit, a new folder that got no shard is removed."""
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
