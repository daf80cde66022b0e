"""What each rank spends on its own work in a step, and who is slower than the others. numpy alone.

All ranks of a pipeline stage do alike, so the odd one is visible (C4, arXiv:2406.04594).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

STEPS_IN_A_ROW = 8
"""A rank is named once it has been slow for so many steps: a pause of the system's is no straggler."""
OWN, DATA, WAIT = 0, 1, 2
"""Columns of what a step knows of each rank, in seconds."""
NUM_TIMES = 3

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Over all ranks, of one step up to its gradients; on CUDA of the step before."""

    own_min_s: float
    """Time that a rank spends on its own work, data included: all but that in collectives."""
    own_median_s: float
    own_max_s: float
    slowest_rank: int
    data_max_s: float
    """Time to load the rank's part of the batch."""
    wait_min_s: float
    """Time in collectives; the rank that the others wait for has the least."""
    wait_median_s: float

    @classmethod
    def from_ranks(cls, times: Array) -> Self | None:
        """Make them of the times of each rank, [ranks, (own, data, wait)]; None if nothing was timed."""
        if not times.any():
            return None
        own = times[:, OWN]
        return cls(
            own_min_s=float(own.min()),
            own_median_s=float(np.median(own)),
            own_max_s=float(own.max()),
            slowest_rank=int(own.argmax()),
            data_max_s=float(times[:, DATA].max()),
            wait_min_s=float(times[:, WAIT].min()),
            wait_median_s=float(np.median(times[:, WAIT])),
        )


class Stragglers:
    """Names ranks whose own time exceeds `factor` times the median of their stage for STEPS_IN_A_ROW steps.

    Of an even number of ranks the lower middle counts, so that one of two can be named. A rank is named once, and again
    after it was as fast as the others.

    Args:
        factor: above 1.
        stages: the ranks of each pipeline stage; those of one do the same work.
        hosts: of each rank.
    """

    def __init__(self, factor: float, stages: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        self._factor = factor
        self._stages = [list(stage) for stage in stages]
        self._hosts = list(hosts)
        self._slow_steps = dict.fromkeys(range(len(self._hosts)), 0)
        self._sums = np.zeros((len(self._hosts), 3))

    def update(self, times: Array) -> list[dict[str, Any]]:
        """Take one step, [ranks, (own, data, wait)]; returns a record of each rank that is to be named now."""
        named = []
        for stage in self._stages:
            own = times[stage, OWN]
            middle = float(np.sort(own)[(len(stage) - 1) // 2])
            for rank in stage:
                if middle <= 0 or times[rank, OWN] <= self._factor * middle:
                    self._slow_steps[rank], self._sums[rank] = 0, 0.0
                    continue
                self._slow_steps[rank] += 1
                self._sums[rank] += (times[rank, OWN], times[rank, DATA], middle)
                if self._slow_steps[rank] == STEPS_IN_A_ROW:
                    named.append(self._record(rank, stage))
        return named

    def _record(self, rank: int, stage: list[int]) -> dict[str, Any]:
        own_s, data_s, median_s = (self._sums[rank] / STEPS_IN_A_ROW).tolist()
        return {
            "kind": "straggler",
            "action": "log",
            "rank": rank,
            "host": self._hosts[rank],
            "own_s": own_s,
            "data_s": data_s,
            "median_s": median_s,
            "ranks": len(stage),
        }


def straggler_words(record: dict[str, Any]) -> str:
    """A straggler for the log."""
    return (
        f"rank {record['rank']} ({record['host']}) is slow: {record['own_s']:.3g} s of its own work a step over "
        f"{STEPS_IN_A_ROW} steps, {record['own_s'] / record['median_s']:.2f} times the median of the {record['ranks']} "
        f"ranks of its stage; {record['data_s']:.2g} s of it for data"
    )
