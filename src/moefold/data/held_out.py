"""Held-out parts of the data: ranges of consecutive samples for validation, or conversations by a hash.

Validation consists of up to 64 ranges of consecutive samples, each at a hashed position in one of as many equal parts
of the data. The tail of the data would have another distribution, such as only the newest texts. Consecutive samples
share one token (the last label is the next sample's first input), so the samples next to each range are in neither
part. The positions depend only on the number of samples and the fraction, not on run.seed: every seed has the same
held-out text.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from moefold.errors import ConfigError
from moefold.integer_hash import hash_ints

_MAX_RANGES = 64
_MIN_RANGE_SAMPLES = 8


@dataclass(frozen=True)
class IndexRanges:
    """Disjoint ascending ranges of sample numbers, indexed like one list."""

    ranges: tuple[range, ...]
    _ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(len(r) for r in self.ranges)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside [0, {len(self)})")
        index_of_range = bisect_right(self._ends, index)
        return self.ranges[index_of_range][index - (self._ends[index_of_range - 1] if index_of_range else 0)]

    def count_in(self, others: Sequence[range]) -> int:
        """Return the number of these sample numbers in other ranges, which are also ascending and disjoint."""
        total = 0
        first = 0
        for span in self.ranges:
            while first < len(others) and others[first].stop <= span.start:
                first += 1
            position = first
            while position < len(others) and others[position].start < span.stop:
                total += min(span.stop, others[position].stop) - max(span.start, others[position].start)
                position += 1
        return total


def split_samples(num_samples: int, validation_fraction: float) -> tuple[IndexRanges, IndexRanges]:
    """Divide samples [0, num_samples) into training and validation. Above 0, a fraction holds out at least one sample.

    Returns:
        (training, validation). No training sample is next to a validation sample.

    Raises:
        ConfigError: the fraction is outside [0, 1) or leaves no sample to train on.
    """
    if not 0 <= validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction={validation_fraction} must be at least 0 and below 1; the default is 0.05"
        )
    if validation_fraction == 0:
        return IndexRanges((range(num_samples),)), IndexRanges(())
    num_held_out = max(1, round(num_samples * validation_fraction))
    if num_held_out + 2 > num_samples:
        raise ConfigError(
            f"data.validation_fraction={validation_fraction} leaves no training sample of the {num_samples} in the "
            "data (the samples next to a held-out range are used by neither part); give more data, lower "
            "train.seq_len, or set data.validation_fraction=0"
        )
    held_out = _held_out_ranges(num_samples, num_held_out)
    training = []
    start = 0
    for run in held_out:
        if run.start - 1 > start:
            training.append(range(start, run.start - 1))
        start = run.stop + 1
    if start < num_samples:
        training.append(range(start, num_samples))
    return IndexRanges(tuple(training)), IndexRanges(tuple(held_out))


def _held_out_ranges(num_samples: int, num_held_out: int) -> list[range]:
    num_runs = min(num_held_out // _MIN_RANGE_SAMPLES, (num_samples - num_held_out) // _MIN_RANGE_SAMPLES, _MAX_RANGES)
    if num_runs <= 1:
        num_train = num_samples - num_held_out
        # With one or two spare samples, only a range at the very start leaves any training sample.
        start = hash_ints(num_samples) % (num_train + 1) if num_train > 2 else 0
        return [range(start, start + num_held_out)]
    ranges = []
    for i in range(num_runs):
        stretch = range(i * num_samples // num_runs, (i + 1) * num_samples // num_runs)
        length = (i + 1) * num_held_out // num_runs - i * num_held_out // num_runs
        start = stretch.start + hash_ints(num_samples, i) % (len(stretch) - length + 1)
        ranges.append(range(start, start + length))
    return ranges


def hold_out(members: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split conversation numbers by a hash of them into training and validation, both ascending."""
    if fraction == 0:
        return members, members[:0]
    num_held_out = max(1, round(len(members) * fraction))
    if num_held_out >= len(members):
        raise ConfigError(
            f"data.validation_fraction={fraction} leaves none of {len(members)} conversations to train on; "
            "give more data or set data.validation_fraction=0"
        )
    hashes = np.array([hash_ints(len(members), number) for number in members.tolist()], dtype=np.uint64)
    order = np.argsort(hashes, kind="stable")
    return np.sort(members[order[num_held_out:]]), np.sort(members[order[:num_held_out]])
