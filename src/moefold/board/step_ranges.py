"""Means of arrays over ranges of steps, in bounded memory while a run grows. numpy only."""

import numpy as np

from moefold.metrics.expert_balance import Array


class StepRanges:
    """Sums and counts of arrays of one shape over at most `max_ranges` ranges of consecutive records.

    When all ranges are full, neighbours are merged and each range takes twice as many records.

    Args:
        max_ranges: even.
    """

    def __init__(self, shape: tuple[int, ...], max_ranges: int) -> None:
        assert max_ranges % 2 == 0, "pairs of ranges are merged"
        self.shape = shape
        self._sums = np.zeros((max_ranges, *shape))
        self._counts = np.zeros((max_ranges, *shape), dtype=np.int64)
        self._steps = np.zeros((max_ranges, 2), dtype=np.int64)
        self._num_records = 0
        self._num_ranges = 0
        self._length = 1

    def __len__(self) -> int:
        return self._num_ranges

    @property
    def last_step(self) -> int:
        """Step of the last record; -1 without records."""
        return int(self._steps[self._num_ranges - 1, 1]) if self._num_ranges else -1

    @property
    def steps(self) -> Array:
        """First and last step of each range, int64 [ranges, 2]."""
        return self._steps[: self._num_ranges]

    def append(self, step: int, record: Array) -> None:
        """Add the record of a step, NaN for values that were not recorded.

        Ranges that contain this or a later step are dropped.
        """
        while self._num_ranges and self.last_step >= step:
            self._num_ranges -= 1
            self._num_records = self._length
        if not self._num_ranges or self._num_records == self._length:
            self._open_range(step)
        known = np.isfinite(record)
        i = self._num_ranges - 1
        self._sums[i] += np.where(known, record, 0.0)
        self._counts[i] += known
        self._steps[i, 1] = step
        self._num_records += 1

    def means(self) -> Array:
        """Return the mean of each range, float64 [ranges, *shape]; NaN without a value."""
        count = self._counts[: self._num_ranges]
        means: Array = np.divide(
            self._sums[: self._num_ranges], count, out=np.full(count.shape, np.nan), where=count > 0
        )
        return means

    def _open_range(self, step: int) -> None:
        if self._num_ranges == len(self._sums):
            half = self._num_ranges // 2
            self._sums[:half] = self._sums[0::2] + self._sums[1::2]
            self._counts[:half] = self._counts[0::2] + self._counts[1::2]
            self._steps[:half] = np.stack([self._steps[0::2, 0], self._steps[1::2, 1]], axis=1)
            self._num_ranges = half
            self._length *= 2
        i = self._num_ranges
        self._sums[i] = 0.0
        self._counts[i] = 0
        self._steps[i] = step
        self._num_ranges += 1
        self._num_records = 0
