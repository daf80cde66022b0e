"""Token ids of an evaluation, split into sequences."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from moefold.data.shard_reader import ShardReader
from moefold.data.token_file import read_npy_header
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

_CHECK_BATCH_TOKENS = 2**24
"""Number of ids that are checked at a time."""


@dataclass(frozen=True)
class TokenDataset:
    """Token ids split into sequences of length S. The shorter tail is used only if `keeps_tail`."""

    ids: np.ndarray | ShardReader
    """Token ids of any integer type, [tokens], which may be mapped from a file."""
    seq_len: int
    keeps_tail: bool

    @classmethod
    def open(cls, ids: np.ndarray | Path, seq_len: int, keeps_tail: bool) -> Self:
        """Split a row of ids, or the ids of an .npy file, which are not read into memory."""
        return cls(open_ids(ids) if isinstance(ids, Path) else ids, seq_len, keeps_tail)

    @property
    def num_full_sequences(self) -> int:
        """Number of sequences of S tokens."""
        return len(self.ids) // self.seq_len

    @property
    def tail(self) -> int:
        """Number of tokens after the last full sequence."""
        return len(self.ids) % self.seq_len

    @property
    def num_sequences(self) -> int:
        """Number of evaluated sequences. A tail of one token has no target."""
        return self.num_full_sequences + (self.keeps_tail and self.tail > 1)

    @property
    def num_predicted(self) -> int:
        """Number of predicted tokens: all tokens except the first of each sequence."""
        tail = self.tail - 1 if self.num_sequences > self.num_full_sequences else 0
        return self.num_full_sequences * (self.seq_len - 1) + tail

    @property
    def num_unused_tokens(self) -> int:
        """Number of tokens in no evaluated sequence."""
        return self.tail if self.num_sequences == self.num_full_sequences else 0

    def batch(self, first: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return `count` sequences from index `first` on, padded with id 0 to [count, width].

        Returns:
            (tokens, labels, is_target, is_token), each [count, width]: inputs, next tokens, the mask of predicted
            tokens, and the mask of tokens that are not padding.
        """
        tokens = np.zeros((count, width), dtype=np.int64)
        labels = np.zeros_like(tokens)
        is_target = np.zeros(tokens.shape, dtype=bool)
        is_token = np.zeros(tokens.shape, dtype=bool)
        for i, number in enumerate(range(first, min(first + count, self.num_sequences))):
            ids = self.ids[number * self.seq_len : (number + 1) * self.seq_len]
            tokens[i, : len(ids)] = ids
            labels[i, : len(ids) - 1] = ids[1:]
            is_target[i, : len(ids) - 1] = True
            is_token[i, : len(ids)] = True
        return tokens, labels, is_target, is_token


def open_ids(path: Path) -> ShardReader:
    """Open an .npy file of token ids without reading it into memory."""
    name = Setting("--tokens", str(path))
    if not path.exists():
        raise ConfigError(name.problem("does not exist", "name an .npy file of token ids"))
    if path.is_dir() or path.suffix != ".npy":
        raise ConfigError(name.problem("is no .npy file", "write the ids with numpy.save"))
    return read_npy_header(path).open()


def check_dataset(dataset: TokenDataset, vocab_size: int, name: str) -> None:
    """Read all ids. Raises ConfigError if an id is outside the vocabulary, or there is no full sequence."""
    if dataset.seq_len < 2:
        rule = "must be at least 2: the first token of a sequence is not predicted"
        raise ConfigError(Problem("--seq-len", dataset.seq_len, rule))
    if dataset.num_sequences == 0:
        tail = (
            ""
            if dataset.keeps_tail or len(dataset.ids) < 2
            else f", or {Setting('--keep-tail')} for a last shorter sequence"
        )
        rule = f"has {len(dataset.ids)} tokens, less than one sequence of {Setting('--seq-len', dataset.seq_len)}"
        raise ConfigError(f"{name} {rule}; give more, or a shorter {Setting('--seq-len')}{tail}")
    for start in range(0, len(dataset.ids), _CHECK_BATCH_TOKENS):
        ids = dataset.ids[start : start + _CHECK_BATCH_TOKENS]
        is_invalid = (ids < 0) | (ids >= vocab_size)
        if is_invalid.any():
            index = int(np.argmax(is_invalid))
            raise ConfigError(
                f"{name} holds id {int(ids[index])} at token {start + index}, but the model's vocabulary is "
                f"{vocab_size}: ids must be 0 to {vocab_size - 1}; tokenise with the model's tokenizer"
            )
