"""Synthetic samples (data.kind="synthetic"): tokens that count upwards by a stride, with random jumps."""

import numpy as np
from numpy.typing import NDArray

from moefold.data.sample import SampleSource
from moefold.integer_hash import draw_bits, hash_ints

NUM_SAMPLES = 2**40
JUMP_PROBABILITY = 0.1
_NUM_STRIDES = 4


class SyntheticSamples(SampleSource):
    """Samples that count upwards by a stride, with random jumps, computed on demand.

    The seed chooses four strides. Each sample uses one of them: token t+1 is (token t + stride) mod V, or, with
    probability 0.1, any token. A model first learns the four successors of each token, and then, with attention, which
    stride the current sample uses.
    """

    def __init__(self, *, seed: int, vocab_size: int, seq_len: int, document_end: int = -1) -> None:
        self.seq_len = seq_len
        self.document_end = document_end
        self.has_annotations = document_end >= 0
        self.vocab_size = vocab_size
        self._seed = seed
        strides = draw_bits(hash_ints(seed, NUM_SAMPLES), _NUM_STRIDES) % np.uint64(max(1, vocab_size - 1))
        self._strides = strides.astype(np.int64) + 1

    def __len__(self) -> int:
        """Return a number of samples that no run reaches."""
        return NUM_SAMPLES

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, int64 [seq_len + 1]."""
        if not 0 <= number < NUM_SAMPLES:
            raise IndexError(f"sample {number} is outside [0, {NUM_SAMPLES})")
        length = self.seq_len + 1
        key = hash_ints(self._seed, number)
        bits = draw_bits(key, 2 * length)
        position = np.arange(length, dtype=np.int64)
        jumps = bits[:length] < np.uint64(int(JUMP_PROBABILITY * 2**64))
        last_jump = np.maximum.accumulate(np.where(jumps, position, 0))
        landed = (bits[length:] % np.uint64(self.vocab_size)).astype(np.int64)[last_jump]
        stride = self._strides[hash_ints(key, length) % _NUM_STRIDES]
        tokens: NDArray[np.int64] = (landed + stride * (position - last_jump)) % self.vocab_size
        return tokens
