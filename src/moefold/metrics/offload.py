"""What leaving memory between the passes brought in a step, and what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadMetrics:
    """Of all ranks."""

    stored_gib: float
    """What left memory, the sum over the ranks."""
    kept_gib: float
    """What should have and stayed, for want of room or of time; the sum over the ranks."""
    io_s: float
    """Time in which a rank carried bytes, out and back: the mean over the ranks."""
    waited_s: float
    """Time in which a rank's training stood still for that: the mean. What is left of io_s was hidden."""

    @classmethod
    def from_sums(cls, sums: Sequence[float], num_ranks: int) -> Self:
        """Make them of sums over the ranks: bytes stored and kept, seconds of carrying and of waiting."""
        stored_bytes, kept_bytes, io_s, waited_s = sums
        return cls(
            stored_gib=stored_bytes / GIB,
            kept_gib=kept_bytes / GIB,
            io_s=io_s / num_ranks,
            waited_s=waited_s / num_ranks,
        )
