"""Autotuning: measure equivalent implementations once for each shape, and cache the fastest."""

from collections.abc import Callable, Hashable, Mapping

import torch

Candidates = Mapping[str, Callable[[], object]]
NUM_WARMUP_RUNS = 2
"""Runs before the timed ones: the first compiles."""
NUM_TIMED_RUNS = 5


class Autotuner:
    """Cache of the fastest implementation by key.

    Args:
        is_enabled: True: measure on CUDA; False: always take the first candidate, for bitwise reproducible runs, as the
            fastest candidate may differ between runs.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._best_by_key: dict[Hashable, str] = {}

    @property
    def best_by_key(self) -> Mapping[Hashable, str]:
        """Choices so far."""
        return self._best_by_key

    def choose(self, key: Hashable, candidates: Candidates, device: torch.device) -> str:
        """Return the name of the fastest candidate; synchronises with the device on the first use of a key.

        Args:
            key: parameters that determine the time, such as the shape.
            candidates: by name, at least one; the first is the default.
            device: where they run.
        """
        if len(candidates) == 1 or not self._is_enabled or device.type != "cuda":
            return next(iter(candidates))
        if key not in self._best_by_key:
            times = {name: _median_ms(way) for name, way in candidates.items()}
            self._best_by_key[key] = min(times, key=times.__getitem__)
        return self._best_by_key[key]


def _median_ms(candidate: Callable[[], object]) -> float:
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
