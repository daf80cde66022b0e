"""64-bit hash of integers, and counter-based random bits without state, equal on every machine and numpy version.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
"""

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
"""Constants of SplitMix64: 2**64 divided by the golden ratio, and the factors of its finaliser."""


def splitmix64(value: int) -> int:
    """Mix 64 bits by a bijection of [0, 2**64)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_A) & MASK
    value = ((value ^ (value >> 27)) * MIX_B) & MASK
    return value ^ (value >> 31)


def hash_ints(*values: int) -> int:
    """Hash a sequence of integers into 64 bits. The order matters."""
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
