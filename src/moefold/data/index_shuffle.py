"""Random permutation of sample indices without memory, and counter-based random bits without state.

An element or draw is a function of its index, equal on every machine and numpy version. The mixer is the finaliser of
SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class IndexShuffle:
    """A seeded bijection of [0, length), evaluated one index at a time.

    A generalised Feistel network over a grid just larger than the length; indices outside the range are permuted again
    until they are inside (cycle walking: Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9).
    """

    def __init__(self, length: int, key: int) -> None:
        """Select the permutation of [0, length) for a 64-bit key."""
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        self.length = length
        self._rows = isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)
        self._round_keys = tuple(hash_ints(key, i) for i in range(_ROUNDS))

    def __call__(self, index: int) -> int:
        """Return the image of one index; raise IndexError if the index is outside [0, length)."""
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside [0, {self.length})")
        image = self._scramble(index)
        while image >= self.length:
            image = self._scramble(image)
        return image

    def _scramble(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for i, key in enumerate(self._round_keys):
            if i % 2 == 0:
                row = (row + splitmix64(key ^ column)) % self._rows
            else:
                column = (column + splitmix64(key ^ row)) % self._columns
        return row * self._columns + column


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
"""Constants of SplitMix64: 2**64 divided by the golden ratio, and the factors of its finaliser."""


def splitmix64(value: int) -> int:
    """Mix 64 bits; a bijection of [0, 2**64)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_A) & MASK
    value = ((value ^ (value >> 27)) * MIX_B) & MASK
    return value ^ (value >> 31)


def hash_ints(*values: int) -> int:
    """Hash a sequence of integers into 64 bits; the order matters."""
    state = 0
    for value in values:
        state = splitmix64(state + GOLDEN + splitmix64(value + GOLDEN))
    return state


def draw_bits(key: int, count: int) -> NDArray[np.uint64]:
    """Draw `count` words of 64 bits from the stream with the given key, [count]."""
    # Array arithmetic of uint64 wraps modulo 2**64 without a warning, as the mixer requires.
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key & MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(MIX_A)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(MIX_B)
    return state ^ (state >> np.uint64(31))
