"""Streaming sampler: tokenise documents on the fly, with bounded memory, no cache and a small resumable state.

The stream is divided into blocks of up to 1,024 samples. A block is packed and shuffled as a whole. The content of
sample n depends only on n and the data. The state of a block is its first document and the number of tokens of it that
belong to the previous block. A resumed run continues reading there. Without a state it reads all earlier data.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moefold.data.index_shuffle import IndexShuffle
from moefold.data.sample import Sample, annotate_documents
from moefold.data.sampler import Sampler
from moefold.data.sources.huggingface import TextTables
from moefold.data.tokenizer import Tokenizer, encode_documents
from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints
from moefold.message_text import Problem

MAX_BLOCK_SAMPLES = 1024
_MAX_BLOCK_TOKENS = 2**23
_BATCH_CHARACTERS = 2**20
NUM_SAMPLES = 2**62


@dataclass(slots=True)
class _TokenizedDocument:
    ids: NDArray[np.int64]
    epoch: int
    state: Any
    used: int = 0


class StreamingSampler(Sampler):
    """Documents packed without padding, in order, epoch after epoch."""

    def __init__(
        self, texts: TextTables, tokenizer: Tokenizer, *, seq_len: int, order_key: int | None, document_end: int
    ) -> None:
        """Start at the first document.

        Args:
            order_key: key of the shuffled order within blocks. None means the order of the data.
            document_end: id that ends a document, for document numbers. -1: no document ids.
        """
        self.seq_len = seq_len
        self.block_samples = max(1, min(MAX_BLOCK_SAMPLES, _MAX_BLOCK_TOKENS // seq_len))
        self._texts = texts
        self._tokenizer = tokenizer
        self._order_key = order_key
        self.document_end = document_end
        self.has_annotations = document_end >= 0
        self._restart()

    def __len__(self) -> int:
        """Return a number of samples that no run reaches: the length of an epoch is unknown in advance."""
        return NUM_SAMPLES

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run, after reading up to its block."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        block, place = divmod(index, self.block_samples)
        if block < self._block or (block == self._block and self._tokens is None):
            self._restart()
        while self._block < block or self._tokens is None:
            self._read_block()
        if self._order_key is not None:
            place = IndexShuffle(self.block_samples, hash_ints(self._order_key, block))(place)
        assert self._tokens is not None
        window = slice(place * self.seq_len, (place + 1) * self.seq_len + 1)
        tokens = self._tokens[window].astype(np.int64)
        return annotate_documents(tokens, self.document_end) if self.has_annotations else Sample(tokens)

    def state(self, index: int) -> Any:
        """Return the start of the block of sample `index`, or of an earlier block if that block is not read yet."""
        if self._tokens is None or index // self.block_samples < self._block:
            return None
        return self._state

    def restore(self, state: Any) -> None:
        """Continue from a state returned by `state`, in this process or an earlier one."""
        if state is None:
            return
        self._restart()
        self._block, self._epoch, texts, self._num_used = state
        # _read_block increments the block number.
        self._block -= 1
        self._document_iterator = self._texts.documents(texts)

    def _restart(self) -> None:
        self._block = -1
        self._epoch = 0
        self._num_used = 0
        self._tokens: NDArray[np.int32] | None = None
        self._queue: deque[_TokenizedDocument] = deque()
        self._document_iterator = self._texts.documents(None)
        self._state: Any = None

    def _read_block(self) -> None:
        size = self.block_samples * self.seq_len
        tokens = np.empty(size + 1, dtype=np.int32)
        head = self._current_document()
        state = [self._block + 1, head.epoch, head.state, head.used]
        filled = 0
        while filled < size:
            document = self._current_document()
            ids = document.ids[document.used : document.used + size - filled]
            tokens[filled : filled + len(ids)] = ids
            document.used += len(ids)
            filled += len(ids)
        # Consecutive samples share a token, so the last token is also the first token of the next block.
        document = self._current_document()
        tokens[size] = document.ids[document.used]
        self._block = self._block + 1
        self._tokens = tokens
        self._state = state

    def _current_document(self) -> _TokenizedDocument:
        """Return the document of the next token."""
        while self._queue and self._queue[0].used == len(self._queue[0].ids):
            self._queue.popleft()
        num_empty = 0
        while not self._queue:
            num_empty = 0 if self._refill() else num_empty + 1
            if num_empty > 1:
                rule = "holds no text: every row is empty"
                raise ConfigError(Problem("data.path", None, rule, "check data.column and data.split"))
        return self._queue[0]

    def _refill(self) -> bool:
        """Tokenise more documents, from the next epoch at the end of the data, and return whether there were any."""
        texts: list[str] = []
        states = []
        size = 0
        for text, state in self._document_iterator:
            texts.append(text)
            states.append(state)
            size += len(text)
            if size >= _BATCH_CHARACTERS:
                break
        separator = [] if self._tokenizer.separator_id is None else [self._tokenizer.separator_id]
        for ids, state in zip(encode_documents(self._tokenizer, texts), states, strict=True):
            document = np.concatenate([ids, separator]).astype(np.int64)
            if len(document) > self._num_used:
                self._queue.append(_TokenizedDocument(document, self._epoch, state, self._num_used))
            self._num_used = 0
        if size < _BATCH_CHARACTERS:
            self._epoch += 1
            self._document_iterator = self._texts.documents(None)
        return bool(texts)
