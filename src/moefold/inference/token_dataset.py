"""A row of token ids cut into sequences, as evaluation reads it. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.data.shard_reader import ShardReader
from moefold.data.token_file import read_npy_header
from moefold.errors import ConfigError

_CHECK_BATCH_TOKENS = 2**24
"""Ids that are looked at in one piece."""


@dataclass(frozen=True)
class TokenDataset:
    """Ids in a row, cut into sequences of S; what is left at the end is a shorter sequence, taken only if asked for."""

    ids: np.ndarray | ShardReader
    """Integers of any width, [tokens]; may be a file."""
    seq_len: int
    keeps_tail: bool

    @property
    def num_full_sequences(self) -> int:
        """Sequences of S tokens."""
        return len(self.ids) // self.seq_len

    @property
    def tail(self) -> int:
        """Tokens behind the last whole sequence."""
        return len(self.ids) % self.seq_len

    @property
    def num_sequences(self) -> int:
        """Sequences that are evaluated; a tail of one token has nothing to predict."""
        return self.num_full_sequences + (self.keeps_tail and self.tail > 1)

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first of each sequence."""
        tail = self.tail - 1 if self.num_sequences > self.num_full_sequences else 0
        return self.num_full_sequences * (self.seq_len - 1) + tail

    @property
    def num_unused_tokens(self) -> int:
        """Tokens of the row that no sequence holds."""
        return (
            len(self.ids) - self.num_full_sequences * self.seq_len
            if self.num_sequences == self.num_full_sequences
            else 0
        )

    def batch(self, first: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Some sequences, filled up to `width` columns and `count` rows with id 0.

        Returns:
            (tokens, labels, is_target), each [count, width]: what is read, the token behind each, and whether it is to
            be predicted.
        """
        tokens = np.zeros((count, width), dtype=np.int64)
        labels = np.zeros_like(tokens)
        is_target = np.zeros(tokens.shape, dtype=bool)
        for i, number in enumerate(range(first, min(first + count, self.num_sequences))):
            part = self.ids[number * self.seq_len : (number + 1) * self.seq_len]
            tokens[i, : len(part)] = part
            labels[i, : len(part) - 1] = part[1:]
            is_target[i, : len(part) - 1] = True
        return tokens, labels, is_target


def open_ids(path: Path, option: str = "--tokens") -> ShardReader:
    """Open an .npy file of ids; they stay on the disk.

    Raises:
        ConfigError: it is missing, or no complete one-dimensional .npy array of integers.
    """
    if not path.exists():
        raise ConfigError(f"{option} {str(path)!r} does not exist; name an .npy file of token ids")
    if path.is_dir() or path.suffix != ".npy":
        raise ConfigError(f"{option} {str(path)!r} is no .npy file; write the ids with numpy.save")
    return read_npy_header(path).open()


def check_dataset(dataset: TokenDataset, vocab_size: int, name: str) -> None:
    """Refuse a row that cannot be evaluated; reads all of it.

    Raises:
        ConfigError: there is no whole sequence, or an id is no row of the embedding.
    """
    if dataset.seq_len < 2:
        raise ConfigError(
            f"--seq-len {dataset.seq_len} must be at least 2: the first token of a sequence is not predicted"
        )
    if dataset.num_sequences == 0:
        tail = "" if dataset.keeps_tail or len(dataset.ids) < 2 else ", or --keep-tail for a last shorter sequence"
        raise ConfigError(
            f"{name} has {len(dataset.ids)} tokens, less than one sequence of --seq-len {dataset.seq_len}; "
            f"give more, or a shorter --seq-len{tail}"
        )
    for start in range(0, len(dataset.ids), _CHECK_BATCH_TOKENS):
        part = dataset.ids[start : start + _CHECK_BATCH_TOKENS]
        strange = (part < 0) | (part >= vocab_size)
        if strange.any():
            place = int(np.argmax(strange))
            raise ConfigError(
                f"{name} holds id {int(part[place])} at token {start + place}, but the model's vocabulary is "
                f"{vocab_size}: ids must be 0 to {vocab_size - 1}; tokenise with the model's tokenizer"
            )
