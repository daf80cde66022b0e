"""Autotuning: measure equivalent implementations once for each shape, and cache the fastest."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch

Candidates = Mapping[str, Callable[[], object]]
NUM_WARMUP_RUNS = 2
"""Runs before the timed ones: the first compiles."""
NUM_TIMED_RUNS = 5
NUM_MEASURING_CALLS = 256
"""Calls of an operation and shape that may measure: the first steps of a run. Later ones reuse a choice, as other ranks
would wait for the measurement."""


class TuningKey(NamedTuple):
    """Parameters that determine the time of an operation."""

    op: str
    num_rows: int
    """Changes every step: counts between two powers of two share a choice."""
    shape: tuple[Hashable, ...]
    """All other parameters."""


class Autotuner:
    """Cache of the fastest implementation by key.

    Args:
        is_enabled: True: measure on CUDA; False: always take the first candidate, for bitwise reproducible runs, as the
            fastest candidate may differ between runs.
        timer: returns the time of a candidate; None: by CUDA events.
    """

    def __init__(self, *, is_enabled: bool, timer: Callable[[Callable[[], object]], float] | None = None) -> None:
        self._is_enabled = is_enabled
        self._timer = timer or _median_ms
        self._num_calls: Counter[Hashable] = Counter()
        self._best_by_octave: defaultdict[Hashable, dict[int, str]] = defaultdict(dict)

    def choose(self, key: TuningKey, candidates: Candidates, device: torch.device) -> str:
        """Return the name of the fastest candidate; synchronises with the device where it measures.

        It measures an operation and shape once for each octave of row counts during the first calls, and then takes the
        choice of the nearest octave, the smaller of two.

        Args:
            key: parameters that determine the time.
            candidates: by name, at least one; the first is the default.
            device: where they run.
        """
        if len(candidates) == 1 or not self._is_enabled or device.type != "cuda":
            return next(iter(candidates))
        op_and_shape = (key.op, key.shape)
        best = self._best_by_octave[op_and_shape]
        octave = key.num_rows.bit_length()
        self._num_calls[op_and_shape] += 1
        if octave not in best and self._num_calls[op_and_shape] <= NUM_MEASURING_CALLS:
            times = {name: self._timer(candidate) for name, candidate in candidates.items()}
            best[octave] = min(times, key=times.__getitem__)
        return best[min(best, key=lambda measured: (abs(measured - octave), measured))]


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
