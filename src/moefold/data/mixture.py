"""Weighted mixture of several data sets: the global sample index alone selects the data set and its sample.

Sample n belongs to the part whose interval contains frac(n * g + 1/2), g the golden ratio: the parts' intervals divide
[0, 1) by their shares. Such multiples are evenly distributed (V. T. Sos, 1958), so every range of samples has the
shares to within a few samples. The number of samples of a part among the first n is a sum of floors: O(log n).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from moefold.data.sample import Sample
from moefold.data.sampler import Sampler

_MODULUS = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_OFFSET = _MODULUS // 2


class Mixture(Sampler):
    """Samplers interleaved by their shares; each advances independently, through epochs of its own."""

    def __init__(self, parts: Sequence[Sampler], shares: Sequence[float]) -> None:
        """Interleave samplers.

        Args:
            parts: the samplers, all of the same sequence length.
            shares: the share of each, above 0, in any unit.
        """
        self.seq_len = parts[0].seq_len
        self.split_name = parts[0].split_name
        self._parts = tuple(parts)
        total = sum(shares)
        self._shares = tuple(share / total for share in shares)
        self.has_annotations = any(part.has_annotations for part in parts)
        self.filled = sum(share * part.filled for share, part in zip(self._shares, parts, strict=True))
        ends = [round(end / total * _MODULUS) for end in accumulate(shares)]
        self._ends = [*ends[:-1], _MODULUS]

    def __len__(self) -> int:
        """Return the length of a mixture epoch: the number of samples before any part repeats."""
        if not all(len(part) for part in self._parts):
            return 0
        first = int(min(len(part) / share for part, share in zip(self._parts, self._shares, strict=True)))
        # The exact counts differ from the shares by a few samples.
        while any(self._count(which, first) > len(part) for which, part in enumerate(self._parts)):
            first -= 1
        return first

    def locate(self, index: int) -> tuple[int, int]:
        """Return the part that sample `index` comes from, and the sample's index there."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        which = bisect_right(self._ends, (index * _GOLDEN + _OFFSET) % _MODULUS)
        return which, self._count(which, index)

    def annotated_sample(self, index: int) -> Sample:
        """Return sample `index` of the run."""
        which, number = self.locate(index)
        return self._parts[which].annotated_sample(number)

    def origin(self, index: int) -> str:
        """Return the sample's part, and its origin there."""
        which, number = self.locate(index)
        return f"part {which}, {self._parts[which].origin(number)}"

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files in all parts; each part ignores the names of other parts."""
        wanted = frozenset(names)
        for part in self._parts:
            part.drop_files(wanted)

    def is_dropped(self, index: int) -> bool:
        """Return whether the sample is dropped in its part."""
        which, number = self.locate(index)
        return self._parts[which].is_dropped(number)

    @property
    def num_dropped(self) -> int:
        """Estimated number of dropped samples in an epoch, from each part's share."""
        length = len(self)
        lost = [
            part.num_dropped / len(part) * self._count(i, length) for i, part in enumerate(self._parts) if len(part)
        ]
        if all(part.num_dropped == len(part) for part in self._parts):
            return length
        return min(length - 1, math.ceil(sum(lost)))

    def state(self, index: int) -> Any:
        """Return the states of the parts, None if none has any."""
        states = [part.state(self._count(which, index)) for which, part in enumerate(self._parts)]
        return None if all(state is None for state in states) else states

    def restore(self, state: Any) -> None:
        """Restore the state of each part."""
        for part, part_state in zip(self._parts, state or [], strict=False):
            part.restore(part_state)

    def _count(self, which: int, num_samples: int) -> int:
        """Return how many of the first samples come from a part."""
        start = self._ends[which - 1] if which else 0
        return _count_below(self._ends[which], num_samples) - _count_below(start, num_samples)


def _count_below(end: int, num_samples: int) -> int:
    """Return the count of n < num_samples with (n * _GOLDEN + _OFFSET) mod _MODULUS < end, for 0 <= end <= _MODULUS."""
    if end == 0:
        return 0
    # floor(y) - floor(y - t) is 1 where frac(y) < t, for 0 < t <= 1.
    whole = floor_sum(num_samples, _MODULUS, _GOLDEN, _OFFSET)
    return whole - floor_sum(num_samples, _MODULUS, _GOLDEN, _OFFSET - end + _MODULUS) + num_samples


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
