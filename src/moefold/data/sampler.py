"""From a sample's global number to its tokens: order, epochs and batches, the same under every mapping.

Which samples are held out, so that both parts come from all over the data and share no token.

Validation is up to 64 runs of neighbouring samples, one at a hashed place in each equal stretch of the data: a tail
would be another distribution (only the last modules, only the newest texts). Neighbouring samples share one token (the
label of the one is the first input of the next), so the sample before and the one after each run are left out of both
parts. The places depend on the number of samples and the fraction alone, never on run.seed: every seed is judged on the
same text.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moefold.data.index_shuffle import IndexShuffle, hash_ints
from moefold.data.sample import (
    AnnotatedSampleSource,
    DroppableSource,
    Sample,
    SampleBatch,
    SampleSource,
    TraceableSampleSource,
    stack_samples,
)
from moefold.errors import ConfigError, RunError

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


class TokenStream(Protocol):
    """A long row of token ids that is read piece by piece."""

    def __len__(self) -> int:
        """Tokens in all."""
        ...

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop-1, [stop - start]."""
        ...


class IndexedStream(TokenStream, Protocol):
    """A row of ids that knows its documents."""

    def document_starts(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the tokens start .. stop-1 is the first of a document, [stop - start]."""
        ...


@runtime_checkable
class LocatedStream(Protocol):
    """A row of ids that lies in files."""

    def describe_location(self, token: int) -> str:
        """File and place of a token, for a message."""
        ...


@runtime_checkable
class DroppableStream(Protocol):
    """A row of ids that lies in files, which can be given up; their ids keep their places."""

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files."""
        ...

    @property
    def dropped_tokens(self) -> list[range]:
        """The places of the files that were given up, ascending."""
        ...

    def is_dropped(self, start: int, stop: int) -> bool:
        """Whether any of the tokens start .. stop-1 is of one of them."""
        ...


class PackedSamples:
    """Documents packed without padding: sample i is tokens[i*S : i*S + S + 1], S = seq_len.

    Neighbours share one token, so every token but the first of the stream is a label once.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        """Cut a stream into samples; a tail shorter than seq_len is left out."""
        self.stream = stream
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Samples of the stream."""
        return max(0, (len(self.stream) - 1) // self.seq_len)

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of one sample, [seq_len + 1]."""
        start = number * self.seq_len
        return self.stream.read(start, start + self.seq_len + 1)

    def origin(self, number: int) -> str:
        """File and tokens of a sample; empty if the stream has no files."""
        start = number * self.seq_len
        return self.stream.describe_location(start) if isinstance(self.stream, LocatedStream) else ""

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files: samples with any token of theirs are lost."""
        if isinstance(self.stream, DroppableStream):
            self.stream.drop_files(names)

    def is_dropped(self, number: int) -> bool:
        """Whether a sample has a token of a file that was given up."""
        start = number * self.seq_len
        return isinstance(self.stream, DroppableStream) and self.stream.is_dropped(start, start + self.seq_len + 1)

    @property
    def dropped_samples(self) -> list[range]:
        """The numbers of the samples that are lost, ascending and disjoint."""
        found: list[range] = []
        for tokens in self.stream.dropped_tokens if isinstance(self.stream, DroppableStream) else ():
            # Sample i has the tokens i * S .. i * S + S.
            first = max(-(-(tokens.start - self.seq_len) // self.seq_len), found[-1].stop if found else 0)
            end = min((tokens.stop - 1) // self.seq_len + 1, len(self))
            if first < end:
                found.append(range(first, end))
        return found


class IndexAnnotatedSamples(PackedSamples):
    """Packed samples with the documents that their stream knows of."""

    stream: IndexedStream

    def __init__(self, stream: IndexedStream, seq_len: int) -> None:
        """Cut a stream into samples."""
        super().__init__(stream, seq_len)

    def annotated_sample(self, number: int) -> Sample:
        """One sample with its documents."""
        start = number * self.seq_len
        begins = self.stream.document_starts(start, start + self.seq_len + 1)
        return Sample(self.sample(number), np.cumsum(begins, dtype=np.int32))


class Sampler(ABC):
    """Samples in the order in which a run visits them, without end: the same row under every mapping."""

    seq_len: int
    split_name: str = "training"
    """What the samples are for, in messages."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples in an epoch."""

    @property
    @abstractmethod
    def has_annotations(self) -> bool:
        """Whether samples may say where documents begin and which targets count."""

    @abstractmethod
    def annotated_sample(self, index: int) -> Sample:
        """The sample that a run takes as its number `index` (0-based, no upper limit); no marks if the data has none.

        Raises:
            ConfigError: there is no sample, or the data holds an id that the model has no row for.
        """

    def sample(self, index: int) -> NDArray[np.int64]:
        """Tokens of the sample that a run takes as its number `index`, int64 [seq_len + 1]; as of `annotated_sample`."""
        return self.annotated_sample(index).tokens

    def batch(self, first: int, count: int) -> SampleBatch:
        """Samples first .. first+count-1 of the run."""
        return self.batch_at(range(first, first + count))

    def batch_at(self, indices: Sequence[int]) -> SampleBatch:
        """These samples of the run, below each other."""
        if self.has_annotations:
            return stack_samples([self.annotated_sample(index) for index in indices], self.seq_len)
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for i, index in enumerate(indices):
            tokens[i] = self.sample(index)
        return SampleBatch(tokens)

    def next_sample_indices(self, first: int, count: int, skipped_ranges: Sequence[range] = ()) -> Sequence[int]:
        """The next `count` samples of the run from sample `first` on, ascending: those that are not lost or left out.

        Raises:
            RunError: all samples are lost.
        """
        if self.is_all_dropped:
            raise RunError(
                f"no {self.split_name} sample is left to take: the files of all of them are left out (data.corrupt='skip'); "
                "bring them back, or give the run other data"
            )
        blocked = [part for part in skipped_ranges if part.stop > first]
        if not self.num_dropped and all(part.start >= first + count for part in blocked):
            return range(first, first + count)
        taken: list[int] = []
        while len(taken) < count:
            if ends := [part.stop for part in blocked if first in part]:
                first = max(ends)
                continue
            if not self.is_dropped(first):
                taken.append(first)
            first += 1
        return taken

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files of the data, by their names in the recipe; where samples keep no place in files, nothing."""
        return

    def is_dropped(self, index: int) -> bool:
        """Whether sample `index` of the run has a token of a file that was given up, so that it cannot be taken."""
        return False

    @property
    def num_dropped(self) -> int:
        """Samples of an epoch that are lost."""
        return 0

    @property
    def is_all_dropped(self) -> bool:
        """Whether there were samples, and all are lost."""
        return self.num_dropped > 0 and self.num_dropped == len(self)

    def origin(self, index: int) -> str:
        """What sample `index` of the run is, for a message: its row in the data, and where that lies if it is known."""
        return f"sample {index}"

    def state(self, index: int) -> Any:
        """What lets a later process reach sample `index` sooner, as JSON keeps it; None: nothing is needed."""
        return None

    def restore(self, state: Any) -> None:
        """Make use of a state that `state` gave; the samples are the same without."""
        return


class Split(Sampler):
    """The training or the validation samples, in the order in which a run visits them.

    Sample n has its meaning from n alone: epoch n // len(split), and a place in that epoch's order. A run's position is
    therefore the number of samples it has taken, whatever the mapping was.
    """

    def __init__(
        self, source: SampleSource, members: IndexRanges, *, order_key: int | None, split_name: str = "training"
    ) -> None:
        """Name the samples of one part.

        Args:
            source: all samples of the data.
            members: the sample numbers of this part.
            order_key: key of the shuffled order, another one for each epoch; None visits them in the order of the data.
            split_name: as of `Sampler`.
        """
        self.seq_len = source.seq_len
        self.split_name = split_name
        self._source = source
        self._members = members
        self._order_key = order_key
        self._epoch_order: tuple[int, IndexShuffle] | None = None
        self._num_dropped = 0
        self.drop_files(())

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._members)

    @property
    def has_annotations(self) -> bool:
        """Whether the source has marks."""
        return isinstance(self._source, AnnotatedSampleSource)

    def annotated_sample(self, index: int) -> Sample:
        """The sample that a run takes as its number `index` (0-based, no upper limit); no marks if the source has none.

        Raises:
            ConfigError: the split is empty, or the data holds an id that the model has no row for.
        """
        number = self._number(index)
        if isinstance(self._source, AnnotatedSampleSource):
            return self._source.annotated_sample(number)
        return Sample(self._source.sample(number))

    def origin(self, index: int) -> str:
        """The sample's row in the data, and where that lies if the source knows."""
        number = self._number(index)
        place = self._source.origin(number) if isinstance(self._source, TraceableSampleSource) else ""
        return f"row {number} ({place})" if place else f"row {number}"

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files of the source."""
        if isinstance(self._source, DroppableSource):
            self._source.drop_files(names)
            self._num_dropped = self._members.count_in(self._source.dropped_samples)

    def is_dropped(self, index: int) -> bool:
        """Whether the sample has a token of a file that was given up."""
        if not self._num_dropped:
            return False
        return isinstance(self._source, DroppableSource) and self._source.is_dropped(self._number(index))

    @property
    def num_dropped(self) -> int:
        """Samples of an epoch that are lost."""
        return self._num_dropped

    def _number(self, index: int) -> int:
        """The number in the source of the sample that a run takes as its `index`-th."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        if not len(self):
            raise ConfigError(
                "data.validation_fraction=0 holds no sample out; set it above 0, "
                "or train.eval_every=0 to train without evaluation"
            )
        epoch, place = divmod(index, len(self))
        return self._members[self._shuffled_position(epoch, place)]

    def _shuffled_position(self, epoch: int, position: int) -> int:
        if self._order_key is None:
            return position
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, IndexShuffle(len(self), hash_ints(self._order_key, epoch)))
        return self._epoch_order[1](position)
