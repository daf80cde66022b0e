"""Writer of the shards of `moefold tokenize`: a shard is complete or absent, with its document index next to it."""

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.bounded_read import MAX_LINE_BYTES, read_json
from moefold.data.conversations.conversation_tokens import SkippedRows
from moefold.data.hf_tokenizer.tokenizer_folder import JsonTokenizer
from moefold.data.input_paths import existing_path
from moefold.data.token_cache import is_complete_array, write_tokens
from moefold.data.token_file import document_ends_path
from moefold.data.tokenize_input import Shard, TextColumn, read_chunks
from moefold.data.tokenizer import ByteTokenizer, OffsetTokenizer
from moefold.errors import ConfigError


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
    """Writer of tokenised shards. It is picklable and small, because worker processes load the tokenizer themselves."""

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

    def remove(self, number: int) -> None:
        """Remove the files of a shard."""
        path = shard_path(self.out, number)
        for file in (path, document_ends_path(path), _skipped_path(path)):
            file.unlink(missing_ok=True)

    def remove_drafts(self) -> None:
        """Remove the temporary files of processes that were terminated, and files next to shards that are not there."""
        for draft in self.out.glob(".tokens-*.partial"):
            draft.unlink()
        for skipped in self.out.glob("tokens-*.skipped.json"):
            if not skipped.with_name(skipped.name.replace(".skipped.json", ".npy")).exists():
                skipped.unlink()


def unwritable_error(out: Path, error: OSError) -> ConfigError:
    """Return the error for an output folder that cannot be written."""
    return ConfigError(f"--out {out} cannot be written ({error.strerror or error}); choose another folder")


def shard_path(out: Path, number: int) -> Path:
    """Return the token file of a shard."""
    return out / f"tokens-{number:06d}.npy"


def _skipped_path(path: Path) -> Path:
    """Return the file with the skipped rows of a token file. It exists if rows were skipped."""
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
