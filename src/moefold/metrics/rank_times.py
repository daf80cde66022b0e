"""What each rank spends on its own work in a step, and who is slower than the others. numpy alone.

All ranks of a pipeline stage do alike, so the odd one is visible (C4, arXiv:2406.04594).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

WINDOW_STEPS = 16
REPORT_SLOW_STEPS = 12
RECOVERED_SLOW_STEPS = 4
"""A rank that was slow in MANY of the last WINDOW steps is named; it is well again once it was in FEW at most."""
MIN_IMPACT = 0.05
"""What makes a rank slow must be at least this part of the step: less is not worth a look at a machine."""
COMPUTE = 0
DATA = 1
COMM = 2
"""Columns of what a step knows of each rank, in seconds."""
NUM_TIMES = 3

Array = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeMetrics:
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
        own = times[:, COMPUTE]
        return cls(
            own_min_s=float(own.min()),
            own_median_s=float(np.median(own)),
            own_max_s=float(own.max()),
            slowest_rank=int(own.argmax()),
            data_max_s=float(times[:, DATA].max()),
            wait_min_s=float(times[:, COMM].min()),
            wait_median_s=float(np.median(times[:, COMM])),
        )


class Stragglers:
    """Names ranks whose own time exceeds `factor` times the median of their stage in most steps of a while.

    The times of single steps scatter, on a machine with other work by more than any factor worth naming: so steps are
    counted, which no pause, however long, counts for more than once. Of an even number of ranks the lower middle
    counts, so that one of two can be named. A rank is named once, and again after it was as fast as the others.

    Args:
        factor: above 1.
        stages: the ranks of each pipeline stage; those of one do the same work.
        hosts: of each rank.
    """

    def __init__(self, factor: float, stages: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        self._factor = factor
        self._stages = [list(stage) for stage in stages]
        self._hosts = list(hosts)
        self._slow: deque[Flags] = deque(maxlen=WINDOW_STEPS)
        self._window_times: deque[Array] = deque(maxlen=WINDOW_STEPS)
        self._reported: set[int] = set()

    def update(self, times: Array) -> list[dict[str, Any]]:
        """Take one step, [ranks, (own, data, wait)]; returns a record of each rank that is to be named now."""
        if not times.any():
            return []
        own = times[:, COMPUTE]
        data = times[:, DATA]
        middle = np.zeros(len(own))
        for stage in self._stages:
            middle[stage] = np.sort(own[stage])[(len(stage) - 1) // 2]
        is_felt = own - middle > MIN_IMPACT * (own + times[:, COMM])
        self._slow.append((own > self._factor * middle) & is_felt)
        self._window_times.append(np.stack([own, data, middle], axis=1))
        counts = np.sum(self._slow, axis=0)
        self._reported -= set(np.flatnonzero(counts <= RECOVERED_SLOW_STEPS).tolist())
        new = [rank for rank in np.flatnonzero(counts >= REPORT_SLOW_STEPS).tolist() if rank not in self._reported]
        self._reported |= set(new)
        return [self._record(rank, int(counts[rank])) for rank in new]

    def _record(self, rank: int, slow_steps: int) -> dict[str, Any]:
        own_s, data_s, median_s = np.median([seen[rank] for seen in self._window_times], axis=0).tolist()
        return {
            "kind": "straggler",
            "action": "log",
            "rank": rank,
            "host": self._hosts[rank],
            "own_s": own_s,
            "data_s": data_s,
            "median_s": median_s,
            "ranks": next(len(stage) for stage in self._stages if rank in stage),
            "slow_steps": slow_steps,
            "steps": len(self._window_times),
        }


def describe_straggler(record: dict[str, Any]) -> str:
    """A straggler for the log."""
    return (
        f"rank {record['rank']} ({record['host']}) is slow in {record['slow_steps']} of {record['steps']} steps: "
        f"{record['own_s']:.3g} s of its own work a step, {record['own_s'] / record['median_s']:.2f} times the median "
        f"of the {record['ranks']} ranks of its stage; {record['data_s']:.2g} s of it for data"
    )
