"""Which samples are held out, so that both parts come from all over the data and share no token.

Validation is up to 64 runs of neighbouring samples, one at a hashed place in each equal stretch of the data: a tail
would be another distribution (only the last modules, only the newest texts). Neighbouring samples share one token (the
label of the one is the first input of the next), so the sample before and the one after each run are left out of both
parts. The places depend on the number of samples and the fraction alone, never on run.seed: every seed is judged on the
same text.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moefold.data.random_bits import hash_ints
from moefold.errors import ConfigError

_MAX_RANGES = 64
_MIN_RANGE_SAMPLES = 8


@dataclass(frozen=True)
class IndexRanges:
    """Disjoint ascending ranges of sample numbers, indexed as if they were one list."""

    ranges: tuple[range, ...]
    _ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Remember where each range ends in the joined list."""
        object.__setattr__(self, "_ends", tuple(accumulate(len(r) for r in self.ranges)))

    def __len__(self) -> int:
        """Samples of all ranges."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        """The sample number at a place of the joined list."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside [0, {len(self)})")
        which = bisect_right(self._ends, index)
        return self.ranges[which][index - (self._ends[which - 1] if which else 0)]

    def count_in(self, others: Sequence[range]) -> int:
        """How many of the sample numbers lie in other ranges, which are ascending and disjoint as well."""
        total, first = 0, 0
        for mine in self.ranges:
            while first < len(others) and others[first].stop <= mine.start:
                first += 1
            which = first
            while which < len(others) and others[which].start < mine.stop:
                total += min(mine.stop, others[which].stop) - max(mine.start, others[which].start)
                which += 1
        return total


def split_samples(num_samples: int, validation_fraction: float) -> tuple[IndexRanges, IndexRanges]:
    """Divide samples [0, num_samples) into training and validation.

    At least one sample is held out when the fraction is above 0.

    Returns:
        (training, validation); no training sample neighbours a validation sample.

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
            "data (one beside each held-out run is used by neither part); give more data, lower train.seq_len, "
            "or set data.validation_fraction=0"
        )
    held_out = _held_out_ranges(num_samples, num_held_out)
    training, start = [], 0
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
        free = num_samples - num_held_out
        # With one or two spare samples only a run at the very start leaves anything to train on.
        start = hash_ints(num_samples) % (free + 1) if free > 2 else 0
        return [range(start, start + num_held_out)]
    ranges = []
    for i in range(num_runs):
        stretch = range(i * num_samples // num_runs, (i + 1) * num_samples // num_runs)
        length = (i + 1) * num_held_out // num_runs - i * num_held_out // num_runs
        start = stretch.start + hash_ints(num_samples, i) % (len(stretch) - length + 1)
        ranges.append(range(start, start + length))
    return ranges
