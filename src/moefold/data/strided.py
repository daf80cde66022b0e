"""Samples of one site of several: site n of count reads the samples n, n + count, n + 2 * count, ... of the run.

Torch-free. The sites read disjoint samples, together the samples of a run with count times the batch.
"""

import math
from collections.abc import Iterable
from typing import Any

from moefold.data.sample import Sample
from moefold.data.sampler import Sampler


class StridedSampler(Sampler):
    """Every count-th sample of a sampler, in order."""

    def __init__(self, source: Sampler, count: int, number: int) -> None:
        """Select the samples of a site.

        Args:
            number: this site, from 0.
        """
        self.seq_len = source.seq_len
        self.split_name = source.split_name
        self.has_annotations = source.has_annotations
        self.filled = source.filled
        self._source = source
        self._count = count
        self._number = number

    def __len__(self) -> int:
        """Return the number of this site's samples in an epoch of all sites."""
        return math.ceil(len(self._source) / self._count)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of this site."""
        return self._source.annotated_sample(self._index(index))

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files of the source."""
        self._source.drop_files(names)

    def is_dropped(self, index: int) -> bool:
        """Return whether sample `index` of this site has a token of a dropped file."""
        return self._source.is_dropped(self._index(index))

    @property
    def num_dropped(self) -> int:
        """Estimated number of this site's dropped samples in an epoch; all of them if the source has no others."""
        if self._source.is_all_dropped:
            return len(self)
        return min(len(self) - 1, math.ceil(self._source.num_dropped / self._count))

    def origin(self, index: int) -> str:
        """Return the origin of the sample in the source."""
        return self._source.origin(self._index(index))

    def state(self, index: int) -> Any:
        """Return the state of the source at this site's next sample."""
        return self._source.state(self._index(index))

    def restore(self, state: Any) -> None:
        """Restore a state of the source."""
        self._source.restore(state)

    def _index(self, index: int) -> int:
        """Return the index in the source of sample `index` of this site."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        return index * self._count + self._number
