"""Samplers: map a global sample index to tokens (train/validation split, shuffling, epochs, batches).

Only the index determines the sample, whatever the parallel mapping.

Validation consists of up to 64 ranges of consecutive samples, each at a hashed position in one of as many equal parts
of the data. The tail of the data would have another distribution, such as only the newest texts. Consecutive samples
share one token (the last label is the next sample's first input), so the samples next to each range are in neither
part. The positions depend only on the number of samples and the fraction, not on run.seed: every seed has the same
held-out text.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moefold.data.index_shuffle import IndexShuffle
from moefold.data.sample import Sample, SampleBatch, SampleSource, stack_samples
from moefold.errors import ConfigError, RunError
from moefold.integer_hash import GOLDEN, hash_ints
from moefold.message_text import Problem

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


class TokenStream(ABC):
    """Long sequence of token ids, read in parts. It may come from files, and have an index of documents."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop-1, [stop - start]."""

    def document_starts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the tokens start .. stop-1 that begin a document, [stop - start]; needs an index."""
        raise NotImplementedError

    def describe_location(self, token: int) -> str:
        """Return the file and position of a token, for a message; empty if it is not from a file."""
        return ""

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files by name. The positions of all ids stay the same."""
        return

    @property
    def dropped_tokens(self) -> list[range]:
        """Token ranges of the dropped files, ascending."""
        return []

    def is_dropped(self, start: int, stop: int) -> bool:
        """Return whether any of the tokens start .. stop-1 belongs to a dropped file."""
        return False


class PackedSamples(SampleSource):
    """Documents packed without padding: sample i is tokens[i*S : i*S + S + 1], S = seq_len.

    Consecutive samples share one token, so every token except the first is a label exactly once.
    """

    def __init__(self, stream: TokenStream, seq_len: int, document_end: int = -1) -> None:
        """Split a stream into samples. A tail shorter than seq_len is not used."""
        self.stream = stream
        self.seq_len = seq_len
        self.document_end = document_end
        self.has_annotations = document_end >= 0

    def __len__(self) -> int:
        return max(0, (len(self.stream) - 1) // self.seq_len)

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, [seq_len + 1]."""
        start = number * self.seq_len
        return self.stream.read(start, start + self.seq_len + 1)

    def origin(self, number: int) -> str:
        """Return file and position of a sample; empty if the stream has no files."""
        return self.stream.describe_location(number * self.seq_len)

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files. Samples with any token of a dropped file are dropped."""
        self.stream.drop_files(names)

    def is_dropped(self, number: int) -> bool:
        """Return whether a sample has a token of a dropped file."""
        start = number * self.seq_len
        return self.stream.is_dropped(start, start + self.seq_len + 1)

    @property
    def dropped_samples(self) -> list[range]:
        """Ranges of the numbers of the dropped samples, ascending and disjoint."""
        dropped: list[range] = []
        for tokens in self.stream.dropped_tokens:
            # Sample i has the tokens i * S to i * S + S, both included.
            first = max(-(-(tokens.start - self.seq_len) // self.seq_len), dropped[-1].stop if dropped else 0)
            end = min((tokens.stop - 1) // self.seq_len + 1, len(self))
            if first < end:
                dropped.append(range(first, end))
        return dropped


class IndexAnnotatedSamples(PackedSamples):
    """Packed samples with document ids taken from the document index of their stream."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        super().__init__(stream, seq_len)
        self.has_annotations = True

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample with its document ids."""
        start = number * self.seq_len
        begins = self.stream.document_starts(start, start + self.seq_len + 1)
        return Sample(self.sample(number), np.cumsum(begins, dtype=np.int32))


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
        """Return sample `index` of the run; without annotations if the data has none."""

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

        Dropped samples and skipped ranges are left out; raises RunError if all samples are dropped.
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
        self, source: SampleSource, members: IndexRanges, *, order_key: int | None, split_name: str = "training"
    ) -> None:
        """Select the samples of one part.

        Args:
            members: the sample numbers of this part.
            order_key: key of the shuffled order, which differs in each epoch; None: the order of the data.
        """
        self.seq_len = source.seq_len
        self.split_name = split_name
        self.has_annotations = source.has_annotations
        # Samples of the source may also belong to other parts.
        self.fill_fraction = source.fill_fraction
        self._source = source
        self._members = members
        self._order_key = order_key
        self._epoch_order: tuple[int, IndexShuffle] | None = None
        self._num_dropped = 0
        self.drop_files(())

    def __len__(self) -> int:
        return len(self._members)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run; raise ConfigError if the split is empty."""
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
        epoch, place = divmod(index, len(self))
        if self._order_key is None:
            return self._members[place]
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, IndexShuffle(len(self), hash_ints(self._order_key, epoch)))
        return self._members[self._epoch_order[1](place)]


_MODULUS = 2**64
_OFFSET = _MODULUS // 2


class MixtureSampler(Sampler):
    """Samplers interleaved by their shares; each advances independently, in its own epochs."""

    def __init__(self, samplers: Sequence[Sampler], shares: Sequence[float]) -> None:
        """Interleave samplers of the same sequence length by their shares, above 0, in any unit."""
        self.seq_len = samplers[0].seq_len
        self.split_name = samplers[0].split_name
        self._samplers = tuple(samplers)
        total = sum(shares)
        self._shares = tuple(share / total for share in shares)
        self.has_annotations = any(sampler.has_annotations for sampler in samplers)
        self.fill_fraction = sum(
            share * sampler.fill_fraction for share, sampler in zip(self._shares, samplers, strict=True)
        )
        ends = [round(end / total * _MODULUS) for end in accumulate(shares)]
        self._ends = [*ends[:-1], _MODULUS]

    def __len__(self) -> int:
        """Return the length of a mixture epoch: the number of samples before any sampler repeats."""
        if not all(len(sampler) for sampler in self._samplers):
            return 0
        first = int(min(len(sampler) / share for sampler, share in zip(self._samplers, self._shares, strict=True)))
        # The exact counts differ from the shares by a few samples.
        while any(self._count(number, first) > len(sampler) for number, sampler in enumerate(self._samplers)):
            first -= 1
        return first

    def locate(self, index: int) -> tuple[int, int]:
        """Return the position of the sampler that sample `index` comes from, and the sample's index there."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        number = bisect_right(self._ends, (index * GOLDEN + _OFFSET) % _MODULUS)
        return number, self._count(number, index)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run."""
        number, index_there = self.locate(index)
        return self._samplers[number].annotated_sample(index_there)

    def origin(self, index: int) -> str:
        """Return the sample's sampler, and its origin there."""
        number, index_there = self.locate(index)
        return f"part {number}, {self._samplers[number].origin(index_there)}"

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files in all samplers; each ignores the names of files of others."""
        dropped_names = frozenset(names)
        for sampler in self._samplers:
            sampler.drop_files(dropped_names)

    def is_dropped(self, index: int) -> bool:
        """Return whether the sample is dropped in its sampler."""
        number, index_there = self.locate(index)
        return self._samplers[number].is_dropped(index_there)

    @property
    def num_dropped(self) -> int:
        """Estimated number of dropped samples in an epoch, from each sampler's share."""
        length = len(self)
        fractions = [
            sampler.num_dropped / len(sampler) * self._count(number, length)
            for number, sampler in enumerate(self._samplers)
            if len(sampler)
        ]
        if all(sampler.num_dropped == len(sampler) for sampler in self._samplers):
            return length
        return min(length - 1, math.ceil(sum(fractions)))

    def state(self, index: int) -> Any:
        """Return the states of the samplers, or None if none has a state."""
        states = [sampler.state(self._count(number, index)) for number, sampler in enumerate(self._samplers)]
        return None if all(state is None for state in states) else states

    def restore(self, state: Any) -> None:
        """Restore the state of each sampler."""
        for sampler, sampler_state in zip(self._samplers, state or [], strict=False):
            sampler.restore(sampler_state)

    def _count(self, number: int, num_samples: int) -> int:
        start = self._ends[number - 1] if number else 0
        return _count_below(self._ends[number], num_samples) - _count_below(start, num_samples)


def _count_below(end: int, num_samples: int) -> int:
    """Return the count of n < num_samples with (n * GOLDEN + _OFFSET) mod _MODULUS < end, for 0 <= end <= _MODULUS."""
    if end == 0:
        return 0
    # floor(y) - floor(y - t) is 1 where frac(y) < t, for 0 < t <= 1.
    total = floor_sum(num_samples, _MODULUS, GOLDEN, _OFFSET)
    return total - floor_sum(num_samples, _MODULUS, GOLDEN, _OFFSET - end + _MODULUS) + num_samples


def floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """Return the sum of (factor * i + offset) // modulus over i < count, for non-negative numbers; O(log modulus).

    Each iteration removes the whole multiples and swaps the axes, as in Euclid's algorithm (Graham, Knuth, Patashnik:
    Concrete Mathematics, sec. 3.5).
    """
    total = 0
    while count > 0:
        total += (count - 1) * count // 2 * (factor // modulus) + count * (offset // modulus)
        factor = factor % modulus
        offset = offset % modulus
        top = factor * count + offset
        if top < modulus:
            break
        count, offset, modulus, factor = top // modulus, top % modulus, factor, modulus
    return total


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
        """Estimated number of this site's dropped samples in an epoch; all samples if the source drops all."""
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
