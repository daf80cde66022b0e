"""Several data sets in one row, each with its share; which sample comes from where follows from its number alone.

Sample n belongs to the part whose interval holds frac(n * g + 1/2), g the golden ratio: the parts' intervals divide
[0, 1) by their shares. Such multiples are spread as evenly as can be (V. T. Sos, 1958), so every stretch of the row has
the shares to within a few samples. How many of the first n samples came from a part is a sum of floors: O(log n).
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
    """Rows joined by their shares; each goes on by itself, through epochs of its own."""

    def __init__(self, parts: Sequence[Sampler], shares: Sequence[float]) -> None:
        """Join rows.

        Args:
            parts: the rows, all of the same sequence length.
            shares: the share of each, above 0, in any unit.
        """
        self.seq_len = parts[0].seq_len
        self.split_name = parts[0].split_name
        self._parts = tuple(parts)
        total = sum(shares)
        self._shares = tuple(share / total for share in shares)
        ends = [round(end / total * _MODULUS) for end in accumulate(shares)]
        self._ends = [*ends[:-1], _MODULUS]

    def __len__(self) -> int:
        """Samples until a part would come twice: an epoch of the mixture."""
        if not all(len(part) for part in self._parts):
            return 0
        first = int(min(len(part) / share for part, share in zip(self._parts, self._shares, strict=True)))
        # The counts differ from the shares by a few samples.
        while any(self._count(which, first) > len(part) for which, part in enumerate(self._parts)):
            first -= 1
        return first

    def locate(self, index: int) -> tuple[int, int]:
        """The part that sample `index` comes from, and the sample's number there."""
        if index < 0:
            raise IndexError(f"sample index {index} must not be negative")
        which = bisect_right(self._ends, (index * _GOLDEN + _OFFSET) % _MODULUS)
        return which, self._count(which, index)

    @property
    def has_annotations(self) -> bool:
        """Whether any part has marks."""
        return any(part.has_annotations for part in self._parts)

    def annotated_sample(self, index: int) -> Sample:
        """The sample that a run takes as its number `index`."""
        which, number = self.locate(index)
        return self._parts[which].annotated_sample(number)

    def origin(self, index: int) -> str:
        """The sample's part, and its row there."""
        which, number = self.locate(index)
        return f"part {which}, {self._parts[which].origin(number)}"

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files of whichever part they are of."""
        wanted = frozenset(names)
        for part in self._parts:
            part.drop_files(wanted)

    def is_dropped(self, index: int) -> bool:
        """Whether the part's sample is lost."""
        which, number = self.locate(index)
        return self._parts[which].is_dropped(number)

    @property
    def num_dropped(self) -> int:
        """Samples of an epoch that are lost, near enough: parts lose each their share of it."""
        length = len(self)
        lost = [
            part.num_dropped / len(part) * self._count(i, length) for i, part in enumerate(self._parts) if len(part)
        ]
        if all(part.num_dropped == len(part) for part in self._parts):
            return length
        return min(length - 1, math.ceil(sum(lost)))

    def state(self, index: int) -> Any:
        """The states of the parts, None if none has any."""
        states = [part.state(self._count(which, index)) for which, part in enumerate(self._parts)]
        return None if all(state is None for state in states) else states

    def restore(self, state: Any) -> None:
        """Give each part its state."""
        for part, mine in zip(self._parts, state or [], strict=False):
            part.restore(mine)

    def _count(self, which: int, num_samples: int) -> int:
        """How many of the first samples come from a part."""
        start = self._ends[which - 1] if which else 0
        return _count_below(self._ends[which], num_samples) - _count_below(start, num_samples)


def _count_below(end: int, num_samples: int) -> int:
    """How many n < num_samples have (n * _GOLDEN + _OFFSET) mod _TURN below `end`, 0 <= end <= _TURN."""
    if end == 0:
        return 0
    # floor(y) - floor(y - t) is 1 where frac(y) < t, for 0 < t <= 1.
    whole = floor_sum(num_samples, _MODULUS, _GOLDEN, _OFFSET)
    return whole - floor_sum(num_samples, _MODULUS, _GOLDEN, _OFFSET - end + _MODULUS) + num_samples


def floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """Sum of (factor * i + offset) // modulus over i < count, for non-negative numbers; O(log modulus).

    Each round takes the whole multiples out and swaps the roles of the axes, as in Euclid's algorithm (Graham, Knuth,
    Patashnik: Concrete Mathematics, sec. 3.5).
    """
    total = 0
    while count > 0:
        total += (count - 1) * count // 2 * (factor // modulus) + count * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        top = factor * count + offset
        if top < modulus:
            break
        count, offset, modulus, factor = top // modulus, top % modulus, factor, modulus
    return total
