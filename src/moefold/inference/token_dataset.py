"""Token dataset of evaluation: a stream of token ids split into sequences. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moefold.data.shard_reader import ShardReader
from moefold.data.token_file import read_npy_header
from moefold.errors import ConfigError

_CHECK_BATCH_TOKENS = 2**24
"""Number of ids that are checked at once."""


@dataclass(frozen=True)
class TokenDataset:
    """Token ids split into sequences of length S; the shorter tail is used only if `keeps_tail`."""

    ids: np.ndarray | ShardReader
    """Token ids of any integer type, [tokens]; may be a file."""
    seq_len: int
    keeps_tail: bool

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
        """Number of evaluated sequences; a tail of one token has no target."""
        return self.num_full_sequences + (self.keeps_tail and self.tail > 1)

    @property
    def num_predicted(self) -> int:
        """Number of predicted tokens: all but the first of each sequence."""
        tail = self.tail - 1 if self.num_sequences > self.num_full_sequences else 0
        return self.num_full_sequences * (self.seq_len - 1) + tail

    @property
    def num_unused_tokens(self) -> int:
        """Number of tokens in no evaluated sequence."""
        return (
            len(self.ids) - self.num_full_sequences * self.seq_len
            if self.num_sequences == self.num_full_sequences
            else 0
        )

    def batch(self, first: int, count: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `count` sequences from index `first` on, padded with id 0 to [count, width].

        Returns:
            (tokens, labels, is_target), each [count, width]: inputs, next tokens, and the mask of predicted tokens.
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
    """Open an .npy file of token ids without reading it into memory.

    Raises:
        ConfigError: the file is missing, or is not a complete one-dimensional .npy array of integers.
    """
    if not path.exists():
        raise ConfigError(f"{option} {str(path)!r} does not exist; name an .npy file of token ids")
    if path.is_dir() or path.suffix != ".npy":
        raise ConfigError(f"{option} {str(path)!r} is no .npy file; write the ids with numpy.save")
    return read_npy_header(path).open()


def check_dataset(dataset: TokenDataset, vocab_size: int, name: str) -> None:
    """Check that a dataset can be evaluated; reads all of its ids.

    Raises:
        ConfigError: there is no full sequence, or an id is outside the vocabulary.
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
        is_invalid = (part < 0) | (part >= vocab_size)
        if is_invalid.any():
            index = int(np.argmax(is_invalid))
            raise ConfigError(
                f"{name} holds id {int(part[index])} at token {start + index}, but the model's vocabulary is "
                f"{vocab_size}: ids must be 0 to {vocab_size - 1}; tokenise with the model's tokenizer"
            )
