"""Times of the ranks in a step: their metrics, and the ranks that are slow in most steps of a window."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPUTE = 0
DATA = 1
COMM = 2
"""Columns COMPUTE, DATA and COMM of the times of a rank in one step, in seconds."""
NUM_TIMES = 3


def rank_time_metrics(times: NDArray[np.float64]) -> dict[str, float] | None:
    """Compute `metrics.definitions.RANK_TIMES` from times, [ranks, (own, data, wait)]. Return None if all are 0."""
    if not times.any():
        return None
    compute = times[:, COMPUTE]
    return {
        "own_min_s": float(compute.min()),
        "own_median_s": float(np.median(compute)),
        "own_max_s": float(compute.max()),
        "slowest_rank": int(compute.argmax()),
        "data_max_s": float(times[:, DATA].max()),
        "wait_min_s": float(times[:, COMM].min()),
        "wait_median_s": float(np.median(times[:, COMM])),
    }


WINDOW_STEPS = 16
REPORT_SLOW_STEPS = 12
RECOVERED_SLOW_STEPS = 4
"""Limits of slow steps among the last WINDOW_STEPS steps: a rank is reported as slow after REPORT_SLOW_STEPS of them,
and has recovered with at most RECOVERED_SLOW_STEPS."""
MIN_IMPACT = 0.05
"""Minimum excess time of a slow rank, as a fraction of the step."""
Array = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Stragglers:
    """Detector of ranks whose own time exceeds `factor` times the median of their stage in most steps of a window.

    Times of single steps vary widely on a shared machine, so slow steps are counted: a long pause counts once. For an
    even number of ranks the lower median is used, so that one of two ranks can be detected. A rank is reported once,
    and again only after it has recovered.
    """

    def __init__(self, factor: float, stages: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        self._factor = factor
        self._stages = [list(stage) for stage in stages]
        self._hosts = list(hosts)
        self._slow: deque[Flags] = deque(maxlen=WINDOW_STEPS)
        self._window_times: deque[Array] = deque(maxlen=WINDOW_STEPS)
        self._reported: set[int] = set()

    def update(self, times: Array) -> list[dict[str, Any]]:
        """Add the times of one step, [ranks, (own, data, wait)], and return a record for each newly detected rank."""
        if not times.any():
            return []
        compute = times[:, COMPUTE]
        data = times[:, DATA]
        median = np.zeros(len(compute))
        for stage in self._stages:
            median[stage] = np.sort(compute[stage])[(len(stage) - 1) // 2]
        has_impact = compute - median > MIN_IMPACT * (compute + times[:, COMM])
        self._slow.append((compute > self._factor * median) & has_impact)
        self._window_times.append(np.stack([compute, data, median], axis=1))
        counts = np.sum(self._slow, axis=0)
        self._reported -= set(np.flatnonzero(counts <= RECOVERED_SLOW_STEPS).tolist())
        new = [rank for rank in np.flatnonzero(counts >= REPORT_SLOW_STEPS).tolist() if rank not in self._reported]
        self._reported |= set(new)
        return [self._record(rank, int(counts[rank])) for rank in new]

    def _record(self, rank: int, slow_steps: int) -> dict[str, Any]:
        own_s, data_s, median_s = np.median([step[rank] for step in self._window_times], axis=0).tolist()
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
    """Return a straggler record as a log line."""
    return (
        f"rank {record['rank']} ({record['host']}) is slow in {record['slow_steps']} of {record['steps']} steps: "
        f"{record['own_s']:.3g} s of its own work a step, {record['own_s'] / record['median_s']:.2f} times the median "
        f"of the {record['ranks']} ranks of its stage; {record['data_s']:.2g} s of it for data"
    )
