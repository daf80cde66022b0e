"""`moefold tokenize`: convert text, JSON lines, JSON arrays or parquet to token files."""

import argparse
import os
import time
from pathlib import Path

from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.message_text import spelled_as
from moefold.terminal import print_escaped

EPILOG = """The folder is read by data.kind="tokens" with data.path=OUT; data.document_index=true keeps attention within
documents. The output does not depend on the number of processes. The same command resumes a run that was stopped or
killed.

examples:
  moefold tokenize corpus/*.jsonl --out tokens --tokenizer tokenizer.json
  moefold tokenize books --out books-tokens --tokenizer bytes --format text
"""


def run(argv: list[str]) -> int:
    """Tokenize the input files."""
    arguments = _parser().parse_args(argv)
    for name in ("processes", "shard_mb"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    from moefold.data.shard_writer import ShardWriter
    from moefold.data.tokenize_job import tokenize_files

    writer = ShardWriter(Path(arguments.out).absolute(), arguments.tokenizer, arguments.column, arguments.skip_bad_rows)
    started_s = time.perf_counter()
    with spelled_as({"data.path": "INPUT", "data.tokenizer": "--tokenizer"}):
        result = tokenize_files(
            arguments.inputs,
            writer,
            input_format=arguments.format,
            shard_bytes=arguments.shard_mb * 10**6,
            num_processes=arguments.processes,
        )
    elapsed_s = time.perf_counter() - started_s
    rate = result.num_new_tokens / elapsed_s
    print_escaped(
        f"{arguments.out}: {result.num_documents:,} documents, {result.num_tokens:,} tokens in {result.num_shards:,} "
        f"shards; {result.num_new_tokens:,} of them new, in {elapsed_s:.1f} s: {rate:,.0f} a second"
    )
    if result.num_skipped:
        print_escaped(f"--skip-bad-rows: {result.num_skipped:,} rows skipped; the first: {result.first_skipped}")
    return 0


def _cores() -> int:
    # Not every system reports the cores that this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold tokenize",
        "Convert text, JSON lines, a JSON array or parquet to token files that a run maps into memory.",
        EPILOG,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, or folders that are read recursively")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder for the token files")
    parser.add_argument("--tokenizer", required=True, metavar="T", help="bytes, a tokenizer.json, or a folder with one")
    parser.option("--format", "auto", None, "auto: by file name", choices=["auto", "text", "jsonl", "parquet"])
    parser.option("--column", "text", None, "field or column with the text (default: text)")
    parser.flag(
        "--skip-bad-rows",
        "skip lines and rows that hold no text in the column, and count them; else the first one ends the command",
    )
    parser.add_argument("--processes", type=int, default=_cores(), metavar="N", help="default: one per core")
    parser.option("--shard-mb", 64, "N", "input per token file, in 10**6 bytes (default: 64)")
    return parser
