"""Samplers: the samples of a run in its order, by their index (shuffling, epochs, batches, shares of sites).

Only the index determines the sample, whatever the parallel mapping.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from moefold.data.held_out import IndexRanges
from moefold.data.index_shuffle import EpochOrder
from moefold.data.sample import Sample, SampleBatch, SampleSource, stack_samples
from moefold.errors import ConfigError, RunError
from moefold.message_text import Problem


class SampleCatalog(Protocol):
    """Numbered samples or prompts of a run, which count its progress through the data."""

    has_annotations: bool
    """Samples may have document ids or target weights."""
    fill_fraction: float
    """Share of the inputs that are not padding, 0 to 1."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def origin(self, index: int) -> str:
        """Return the location of a sample in the data, for a message."""
        ...


class Sampler(SampleSource):
    """Endless sequence of samples in the order of a run, the same under every parallel mapping.

    The number of a sample is its index in the run, 0-based and without an upper limit. The length is the number of
    samples in an epoch. `annotated_sample` raises ConfigError if there is no sample, or the data holds an id outside
    the model's vocabulary.
    """

    split_name: str = "training"
    """Name of the split in messages."""

    @abstractmethod
    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run, without annotations if the data has none."""

    def batch(self, first: int, count: int) -> SampleBatch:
        """Return samples first .. first+count-1 of the run."""
        return self.batch_at(range(first, first + count))

    def batch_at(self, indices: Sequence[int]) -> SampleBatch:
        """Return the given samples of the run, stacked."""
        if self.has_annotations:
            return stack_samples([self.annotated_sample(index) for index in indices], self.seq_len)
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for i, index in enumerate(indices):
            tokens[i] = self.sample(index)
        return SampleBatch(tokens)

    def next_sample_indices(self, first: int, count: int, skipped_ranges: Sequence[range] = ()) -> Sequence[int]:
        """Return the indices of the next `count` usable samples from sample `first` on, ascending.

        Dropped samples and skipped ranges are left out. Raises RunError if all samples are dropped.
        """
        if self.is_all_dropped:
            raise RunError(
                f"every {self.split_name} sample belongs to a skipped file (data.corrupt='skip'); restore the files, "
                "or give the run other data"
            )
        return next_indices(first, count, skipped_ranges, self.is_dropped if self.num_dropped else None)

    @property
    def num_dropped(self) -> int:
        """Number of dropped samples in an epoch."""
        return 0

    @property
    def is_all_dropped(self) -> bool:
        """True if the data had samples and all of them are dropped."""
        return self.num_dropped > 0 and self.num_dropped == len(self)

    def origin(self, index: int) -> str:
        """Return a description of sample `index` for a message: its number in the data, and its file if known."""
        return f"sample {index}"

    def state(self, index: int) -> Any:
        """Return a JSON-serialisable state for fast access to sample `index` later, or None if no state is needed."""
        return None

    def restore(self, state: Any) -> None:
        """Restore a state returned by `state`. It only saves time and does not change the samples."""
        return


def next_indices(
    first: int, count: int, skipped_ranges: Sequence[range], is_dropped: Callable[[int], bool] | None = None
) -> Sequence[int]:
    """Return the next `count` numbers from `first` on, ascending, outside the skipped ranges and not dropped."""
    blocked = [span for span in skipped_ranges if span.stop > first]
    if is_dropped is None and all(span.start >= first + count for span in blocked):
        return range(first, first + count)
    indices: list[int] = []
    while len(indices) < count:
        if ends := [span.stop for span in blocked if first in span]:
            first = max(ends)
            continue
        if is_dropped is None or not is_dropped(first):
            indices.append(first)
        first += 1
    return indices


class SplitSampler(Sampler):
    """Training or validation samples, in the order of a run.

    Sample n depends only on n: on the epoch n // len(split) and the position in that epoch's order. The position of a
    run is therefore the number of samples it has consumed, whatever the parallel mapping.
    """

    def __init__(
        self,
        source: SampleSource,
        members: IndexRanges | None = None,
        *,
        order_key: int | None,
        split_name: str = "training",
    ) -> None:
        """Select the samples of one part.

        Args:
            members: the sample numbers of this part. None means all.
            order_key: key of the shuffled order, which differs in each epoch. None means the order of the data.
        """
        self.seq_len = source.seq_len
        self.split_name = split_name
        self.has_annotations = source.has_annotations
        # Samples of the source may also belong to other parts.
        self.fill_fraction = source.fill_fraction
        self._source = source
        self._members = IndexRanges((range(len(source)),)) if members is None else members
        self._order = EpochOrder(len(self._members), order_key)
        self._num_dropped = 0
        self.drop_files(())

    def __len__(self) -> int:
        return len(self._members)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run. Raises ConfigError if the split is empty."""
        return self._source.annotated_sample(self._number(index))

    def origin(self, index: int) -> str:
        """Return the sample's number in the data, and its file if the source has it."""
        number = self._number(index)
        place = self._source.origin(number)
        return f"row {number} ({place})" if place else f"row {number}"

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files of the source."""
        self._source.drop_files(names)
        self._num_dropped = self._members.count_in(self._source.dropped_samples)

    def is_dropped(self, index: int) -> bool:
        """Return whether the sample has a token of a dropped file."""
        return self._num_dropped > 0 and self._source.is_dropped(self._number(index))

    @property
    def num_dropped(self) -> int:
        """Number of dropped samples in an epoch."""
        return self._num_dropped

    def _number(self, index: int) -> int:
        """Return the number in the source of sample `index` of the run."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        if not len(self):
            rule = "holds no sample out"
            way_out = "set it above 0, or train.eval_every=0 to train without evaluation"
            raise ConfigError(Problem("data.validation_fraction", 0, rule, way_out))
        return self._members[self._order(index)]


class StridedSampler(Sampler):
    """Every count-th sample of a sampler, in order."""

    def __init__(self, source: Sampler, count: int, number: int) -> None:
        """Select the samples of site `number`, from 0."""
        self.seq_len = source.seq_len
        self.split_name = source.split_name
        self.has_annotations = source.has_annotations
        self.fill_fraction = source.fill_fraction
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
        """Estimated number of this site's dropped samples in an epoch, or all samples if the source drops all."""
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
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        return index * self._count + self._number
