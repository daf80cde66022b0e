"""Which of several ways to compute the same thing is fastest here: measured once for each shape, then remembered."""

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

Ways = Mapping[str, Callable[[], Tensor]]
WARM_UPS = 2
"""Runs before the measured ones: the first compiles."""
RUNS = 5


class MeasuredChoice:
    """Remembers the fastest way by key.

    Args:
        measures: whether to measure on CUDA; else the first way is taken, always the same one, as runs whose repeats
            are to be bit-equal need it: which of two ways is faster may come out differently.
    """

    def __init__(self, *, measures: bool) -> None:
        self._measures = measures
        self._best: dict[Hashable, str] = {}

    @property
    def chosen(self) -> Mapping[Hashable, str]:
        """What was chosen so far."""
        return self._best

    def run(self, key: Hashable, ways: Ways, device: torch.device) -> Tensor:
        """The result of the best way; waits for the device the first time that a key is seen.

        Args:
            key: what the time depends on, such as the shape.
            ways: by name, at least one; the first is the guess.
            device: where they run.
        """
        if len(ways) == 1 or not self._measures or device.type != "cuda":
            return next(iter(ways.values()))()
        if key not in self._best:
            times = {name: _median_ms(way) for name, way in ways.items()}
            self._best[key] = min(times, key=times.__getitem__)
        return ways[self._best[key]]()


def _median_ms(way: Callable[[], Tensor]) -> float:
    for _ in range(WARM_UPS):
        way()
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[RUNS // 2]
