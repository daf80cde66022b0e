"""Which of several ways to compute the same thing is fastest here: measured once for each shape, then remembered."""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

Candidates = Mapping[str, Callable[[], Tensor]]
NUM_WARMUP_RUNS = 2
"""Runs before the measured ones: the first compiles."""
NUM_TIMED_RUNS = 5


class Autotuner:
    """Remembers the fastest way by key.

    Args:
        is_enabled: whether to measure on CUDA; else the first way is taken, always the same one, as runs whose repeats
            are to be bit-equal need it: which of two ways is faster may come out differently.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._best_by_key: dict[Hashable, str] = {}

    @property
    def best_by_key(self) -> Mapping[Hashable, str]:
        """What was chosen so far."""
        return self._best_by_key

    def run(self, key: Hashable, candidates: Candidates, device: torch.device) -> Tensor:
        """The result of the best way; waits for the device the first time that a key is seen.

        Args:
            key: what the time depends on, such as the shape.
            candidates: by name, at least one; the first is the guess.
            device: where they run.
        """
        if len(candidates) == 1 or not self._is_enabled or device.type != "cuda":
            return next(iter(candidates.values()))()
        if key not in self._best_by_key:
            times = {name: _median_ms(way) for name, way in candidates.items()}
            self._best_by_key[key] = min(times, key=times.__getitem__)
        return candidates[self._best_by_key[key]]()


def _median_ms(candidate: Callable[[], Tensor]) -> float:
    for _ in range(NUM_WARMUP_RUNS):
        candidate()
    times = []
    for _ in range(NUM_TIMED_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        candidate()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[NUM_TIMED_RUNS // 2]
