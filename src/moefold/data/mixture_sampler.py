"""Mixture of samplers by their shares (data.weights). The index of a sample determines its sampler."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from moefold.data.sample import Sample
from moefold.data.sampler import Sampler
from moefold.integer_hash import GOLDEN

_MODULUS = 2**64
_OFFSET = _MODULUS // 2


class MixtureSampler(Sampler):
    """Samplers interleaved by their shares. Each advances independently, in its own epochs."""

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
        """Drop files in all samplers. Each ignores the names of files of others."""
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
    """Return the sum of (factor * i + offset) // modulus over i < count, for non-negative numbers, in O(log modulus).

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
