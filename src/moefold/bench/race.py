"""Timing contestants fairly on a noisy machine: in turn, in one process, medians."""

import statistics
import time
from collections.abc import Callable, Mapping


def race(contestants: Mapping[str, Callable[[], None]], *, warmup: int, rounds: int) -> dict[str, list[float]]:
    """Run every contestant once a round, after some rounds that do not count; returns seconds by name."""
    times_s: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + rounds):
        for name, step in contestants.items():
            started_s = time.perf_counter()
            step()
            if i >= warmup:
                times_s[name].append(time.perf_counter() - started_s)
    return times_s


def median_ratio(fast_s: list[float], slow_s: list[float]) -> float:
    """Median over the rounds of how many times faster the first is, round by round."""
    return statistics.median(slow / fast for fast, slow in zip(fast_s, slow_s, strict=True))
