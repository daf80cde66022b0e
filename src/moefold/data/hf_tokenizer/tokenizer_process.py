"""Client of the subprocess that runs a tokenizer.

It is restarted after it exceeded a limit, and after a fork.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.bounded_read import batch_by_size
from moefold.data.limited_process import LimitedProcess, ProcessEndedError

BATCH_BYTES = 4 << 20
"""Size of texts sent at once: it bounds the memory of a batch, and is enough work for many cores."""
_WORKER = Path(__file__).with_name("tokenizer_worker.py")
_LINE_BYTES = 64 << 20
_MAX_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    """Resource limits of a tokenizer: several times the needs of published tokenizers."""

    cpu_s: float = 60.0
    """CPU time of a request, in addition to `cpu_s_per_byte`."""
    cpu_s_per_byte: float = 20e-6
    """CPU time of a byte of text. Byte pair encoding takes 0.2e-6 to 2e-6."""
    memory_bytes: int = 1 << 30
    """Memory in addition to file and text."""
    memory_per_file_byte: int = 32
    memory_per_text_byte: int = 512


class TokenizerError(ValueError):
    """A tokenizer refuses a file or a text, or exceeds a limit. The message is the reason."""


class TokenizerProcess:
    """A tokenizer in a subprocess with limited memory and time. Threads may share it."""

    def __init__(self, read: Callable[[], Sequence[bytes]], limits: TokenizerLimits) -> None:
        """Start the process and load the tokenizer in it. Raises TokenizerError if the content is not a tokenizer.

        `read` returns a tokenizer.json, or a vocab.json and a merges.txt. It is called for each start of the process.
        """
        self._read_files = read
        self._limits = limits
        files = read()
        self.sha256 = _hash(files)
        """Hash of the files."""
        self._base_bytes = limits.memory_bytes + limits.memory_per_file_byte * sum(map(len, files))
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._declarations = b""
        self._process, answer = self._start(files)
        self.model: str = answer["model"]
        """Class of the model, such as "BPE"."""
        self.is_byte_level: bool = answer["is_byte_level"]
        """True if the file names a byte-level part."""

    def declare(self, declarations: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the declarations of the files next to a tokenizer. This is called once, before any text.

        Args:
            declarations: `settings`, `tokens_map` and `added_tokens`, as in their files, and the `class` that rebuilds
                the tokenizer, or None. `is_slow`: it has no tokenizer.json. `asked_tokens`, `asked_ids`: tokens and ids
                to look up.

        Returns:
            `special_tokens` by name, the `ids` of special and asked tokens in the vocabulary, `known_ids` (the asked
            ids that are in it), `vocab_size` (one more than the largest id) and `added_ids`.
        """
        self._declarations = json.dumps(declarations).encode()
        self._base_bytes += self._limits.memory_per_file_byte * len(self._declarations)
        return self._exchange(self._process, {"do": "declare"}, self._declarations)[0]

    def encode(
        self, texts: Sequence[str], *, offsets: bool = False, start: bool = False
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the ids of each text, [tokens], and with `offsets` the range of characters of each id, [tokens, 2].

        `start` adds the special tokens of the post-processor, as at the start of a document.
        """
        empty = np.empty(0, dtype=np.int64)
        for batch in batch_by_size((text.encode() for text in texts), len, BATCH_BYTES):
            request = {"do": "encode", "sizes": [len(text) for text in batch], "offsets": offsets, "start": start}
            header, data = self._ask(request, b"".join(batch))
            numbers = np.frombuffer(data, dtype=np.uint32).astype(np.int64)
            ends = np.cumsum(header["counts"]).tolist()
            total = ends[-1]
            for end, count in zip(ends, header["counts"], strict=True):
                first = end - count
                pairs = numbers[total + 2 * first : total + 2 * end].reshape(-1, 2) if offsets else empty
                yield numbers[first:end], pairs

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Return the text of ids. Ids that are not tokens are ignored."""
        clipped = np.where((ids < 0) | (ids > _MAX_ID), _MAX_ID, ids).astype(np.uint32)
        return self._ask({"do": "decode"}, clipped.tobytes())[1].decode()

    def serialize(self) -> bytes:
        """Return a tokenizer.json with the declarations."""
        return self._ask({"do": "serialize"}, b"")[1]

    def content_hash(self) -> str:
        """Return a hash of the facts that determine ids and text, whatever the bytes of the files."""
        digest: str = self._ask({"do": "content_hash"}, b"")[0]["sha256"]
        return digest

    def pieces(self) -> tuple[list[bytes], frozenset[int]]:
        """Return the bytes of each id in a text, empty for ids that are not tokens, and the ids of special tokens."""
        header, data = self._ask({"do": "pieces"}, b"")
        ends = np.cumsum(header["sizes"], dtype=np.int64).tolist()
        pieces = [data[end - size : end] for end, size in zip(ends, header["sizes"], strict=True)]
        return pieces, frozenset(header["special"])

    def _ask(self, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if self._owner != os.getpid():
            # A thread that does not exist after the fork may hold the lock.
            self._owner = os.getpid()
            self._lock = threading.Lock()
        with self._lock:
            if not self._process.is_usable:
                self._process = self._restart()
            return self._exchange(self._process, request, payload)

    def _restart(self) -> LimitedProcess:
        try:
            files = self._read_files()
        except OSError as error:
            raise TokenizerError(f"its file cannot be read again: {error.strerror or error}") from error
        if _hash(files) != self.sha256:
            raise TokenizerError("its file has changed since it was loaded")
        process = self._start(files)[0]
        if self._declarations:
            self._exchange(process, {"do": "declare"}, self._declarations)
        return process

    def _start(self, files: Sequence[bytes]) -> tuple[LimitedProcess, dict[str, Any]]:
        process = LimitedProcess(_WORKER, memory_bytes=self._base_bytes)
        request = {"do": "load", "sizes": [len(content) for content in files]}
        return process, self._exchange(process, request, b"".join(files))[0]

    def _exchange(
        self, process: LimitedProcess, request: dict[str, Any], payload: bytes
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer and its data."""
        limits = self._limits
        is_text = request["do"] not in ("load", "declare")
        memory = self._base_bytes + (limits.memory_per_text_byte * len(payload) if is_text else 0)
        cpu_s = limits.cpu_s + limits.cpu_s_per_byte * len(payload)
        try:
            answer, data = process.ask(
                request, payload, memory_bytes=memory, cpu_s=cpu_s, limit=_LINE_BYTES, does="runs"
            )
        except ProcessEndedError as error:
            raise TokenizerError(str(error)) from None
        if "refused" in answer:
            raise TokenizerError(answer["refused"])
        return answer, data


def _hash(files: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(files)).hexdigest()


@dataclass(frozen=True)
class TokenTable:
    """Table of the text of each id of a tokenizer."""

    pieces: Sequence[bytes]
    """Bytes of each id, [ids]. Ids that are not tokens have none."""
    special_ids: frozenset[int]
    """Ids of the tokens that are marks, not text."""
