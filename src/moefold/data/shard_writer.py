"""Shards of tokens on disk: whole or not there, each with the index of its documents."""

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from moefold.data.cache import is_complete_array, npy_header, smallest_dtype
from moefold.data.document import TextChunk
from moefold.data.path import existing_path
from moefold.data.shard_plan import Shard, read_chunks
from moefold.data.token_file import document_ends_path
from moefold.data.tokenizer import ByteTokenizer, JsonTokenizer, OffsetTokenizer
from moefold.errors import ConfigError

TMP_PATTERN = ".tokens-*.partial"
_BATCH_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class ShardSize:
    """How much came of a shard."""

    num_tokens: int
    num_documents: int


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Tokenises shards; cheap to send to another process, which loads the tokenizer itself."""

    out: Path
    tokenizer_name: str
    column: str

    def load_tokenizer(self) -> OffsetTokenizer:
        """The tokenizer: bytes or a tokenizer.json.

        Raises:
            ConfigError: there is no such file, or it is no tokenizer.
        """
        if self.tokenizer_name == "bytes":
            return ByteTokenizer()
        return JsonTokenizer(existing_path("--tokenizer", self.tokenizer_name))

    def find_finished(self, number: int) -> ShardSize | None:
        """The size of a shard that is there already; None if it is not."""
        path = shard_path(self.out, number)
        index = document_ends_path(path)
        if not index.is_file() or not is_complete_array(path):
            return None
        return ShardSize(len(np.load(path, mmap_mode="r")), index.stat().st_size // 8)

    def write(self, shard: Shard, report: Callable[[int], None]) -> ShardSize:
        """Tokenise a shard and give it its name, the index first.

        Args:
            shard: what to read.
            report: told the bytes of input that were read since the last call.

        Raises:
            ConfigError: the input is not what it should be, or the folder cannot be written; nothing of the shard is
                left then.
        """
        tokenizer = self.load_tokenizer()
        path = shard_path(self.out, shard.number)
        draft = self.out / f".{path.stem}.{uuid.uuid4().hex}.partial"
        index_draft = self.out / f".{path.stem}.{uuid.uuid4().hex}.index.partial"
        try:
            with draft.open("xb") as file, index_draft.open("xb") as index:
                size = _write_shard(file, index, shard, self.column, tokenizer, report)
                for opened in (file, index):
                    opened.flush()
                    os.fsync(opened.fileno())
            index_draft.replace(document_ends_path(path))
            draft.replace(path)
        except ConnectionError:
            # It is the one that is reported to who has gone.
            raise
        except OSError as error:
            raise unwritable_error(self.out, error) from error
        finally:
            draft.unlink(missing_ok=True)
            index_draft.unlink(missing_ok=True)
        return size


def unwritable_error(out: Path, error: OSError) -> ConfigError:
    """What to say of a folder that the system does not let us write to."""
    return ConfigError(f"--out {out} cannot be written ({error.strerror or error}); choose another folder")


def shard_path(out: Path, number: int) -> Path:
    """The token file of a shard."""
    return out / f"tokens-{number:06d}.npy"


def _write_shard(
    file: BinaryIO,
    index: BinaryIO,
    shard: Shard,
    column: str,
    tokenizer: OffsetTokenizer,
    report: Callable[[int], None],
) -> ShardSize:
    dtype = smallest_dtype(tokenizer.vocab_size)
    separator = np.array([] if tokenizer.separator_id is None else [tokenizer.separator_id], dtype=np.int64)
    file.write(npy_header(dtype, 0))
    num_tokens = num_documents = 0
    for pieces in _chunk_batches(shard, column):
        ends: list[int] = []
        parts: list[NDArray[np.int64]] = []
        for piece, ids in zip(pieces, tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            parts += [ids, separator] if piece.ends_document else [ids]
            num_tokens += len(ids) + (len(separator) if piece.ends_document else 0)
            if piece.ends_document:
                ends.append(num_tokens)
        file.write(np.concatenate(parts).astype(dtype).tobytes())
        index.write(np.array(ends, dtype="<i8").tobytes())
        num_documents += len(ends)
        report(sum(piece.size_bytes for piece in pieces))
    file.seek(0)
    file.write(npy_header(dtype, num_tokens))
    return ShardSize(num_tokens, num_documents)


def _chunk_batches(shard: Shard, column: str) -> Iterator[list[TextChunk]]:
    """Pieces of several megabytes at a time."""
    pieces: list[TextChunk] = []
    size = 0
    for portion in shard.slices:
        for piece in read_chunks(portion, column):
            pieces.append(piece)
            size += len(piece.text)
            if size >= _BATCH_BYTES:
                yield pieces
                pieces, size = [], 0
    if pieces:
        yield pieces
