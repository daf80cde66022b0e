"""Autotuning: measure equivalent implementations once for each shape. All ranks choose the same implementation."""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

Candidates = Mapping[str, Callable[[], object]]
CandidateTimes = dict[str, float]
"""Milliseconds by candidate, or infinite for a candidate that raised."""
Times = dict[str, dict[int, CandidateTimes]]
"""Times by operation with its shape, and by octave of the number of rows."""
NUM_WARMUP_RUNS = 2
"""Runs before the timed runs: the first run compiles."""
NUM_TIMED_RUNS = 5
MAX_MEASURING_S = 120.0
"""Time limit for starting measurements in a process: shapes that are not measured take the choice of another octave."""


class TuningKey(NamedTuple):
    """Parameters that determine the time of an operation."""

    op: str
    num_rows: int
    """Number of rows, which changes every step: counts between two powers of two share a choice."""
    shape: tuple[Hashable, ...]
    """All other parameters."""

    @property
    def octave(self) -> int:
        """The number of rows is below 2 to this power, and at least half of it."""
        return self.num_rows.bit_length()

    @property
    def operation(self) -> str:
        """Operation and shape as text."""
        return f"{self.op}: {', '.join(map(_text, self.shape))}"


class Autotuner:
    """Choice of the fastest implementation by key: from recorded times, or measured where it is first needed.

    A single rank uses its measurements immediately. Several ranks use the first candidate, the default, until `settle`
    gives all of them the same times. After that nothing is measured, because other ranks would wait for it.

    Args:
        is_enabled: False: always take the first candidate, for bitwise reproducible runs, as the fastest candidate may
            differ between runs.
        num_ranks: ranks that must make the same choices.
        timer: returns the milliseconds of a candidate. None means by CUDA events.
        clock: returns seconds, for `MAX_MEASURING_S`.
    """

    def __init__(
        self,
        *,
        is_enabled: bool,
        num_ranks: int = 1,
        timer: Callable[[Callable[[], object]], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.is_enabled = is_enabled
        self._is_alone = num_ranks == 1
        self._is_open = is_enabled
        self._timer = timer or _median_ms
        self._clock = clock
        self._measuring_s = 0.0
        self._is_measuring = False
        self._times: Times = {}
        self._measured: Times = {}
        self._chosen: dict[TuningKey, str] = {}
        self._names: dict[TuningKey, tuple[str, ...]] = {}

    def choose(self, key: TuningKey, candidates: Candidates) -> str:
        """Return the name of the candidate to run.

        Synchronises with the device when it measures. Without times of this octave, the nearest octave with times
        decides, and of two equally near octaves the smaller one.

        Args:
            key: parameters that determine the time.
            candidates: candidates by name, at least one. The first is the default.
        """
        names = tuple(candidates)
        if len(names) == 1 or not self.is_enabled:
            return names[0]
        key = key._replace(num_rows=(1 << key.octave) - 1)
        if self._is_measuring:
            return self._choose(key, candidates)
        if self._names.get(key) != names:
            self._chosen[key] = self._choose(key, candidates)
            self._names[key] = names
        return self._chosen[key]

    def _choose(self, key: TuningKey, candidates: Candidates) -> str:
        names = tuple(candidates)
        if self._is_open and key.octave not in _comparable(self._times, key.operation, names):
            by_octave = self._measured.setdefault(key.operation, {})
            if by_octave.get(key.octave, {}).keys() != candidates.keys() and self._measuring_s < MAX_MEASURING_S:
                by_octave[key.octave] = self._measure(key, candidates)
            times = by_octave.get(key.octave, dict.fromkeys(names, 0.0))
            # A candidate that calls other operations is timed with the fastest of them.
            if not self._is_alone and not self._is_measuring:
                return next(name for name in names if math.isfinite(times[name]))
            if self._is_alone:
                self._times.setdefault(key.operation, {}).update(by_octave)
            else:
                return min(times, key=times.__getitem__)
        return self._fastest(key, names)

    def _fastest(self, key: TuningKey, names: tuple[str, ...]) -> str:
        times = _comparable(self._times, key.operation, names)
        if not times:
            return names[0]
        nearest = times[min(times, key=lambda octave: (abs(octave - key.octave), octave))]
        return min(names, key=nearest.__getitem__)

    def _measure(self, key: TuningKey, candidates: Candidates) -> CandidateTimes:
        """Time each candidate. A candidate that raises is named in a warning, and is not chosen.

        Raises:
            RuntimeError: no candidate runs.
        """
        is_nested, self._is_measuring = self._is_measuring, True
        started_s = self._clock()
        try:
            times = {name: self._ms(key, name, candidate) for name, candidate in candidates.items()}
        finally:
            self._is_measuring = is_nested
        if not is_nested:
            self._measuring_s += self._clock() - started_s
        if not any(map(math.isfinite, times.values())):
            raise RuntimeError(f"{key.operation}: none of {', '.join(candidates)} runs; the log has the reasons")
        return times

    def _ms(self, key: TuningKey, name: str, candidate: Callable[[], object]) -> float:
        try:
            return self._timer(candidate)
        except Exception as error:  # noqa: BLE001 - a kernel's compiler and a library may raise anything
            reason = next(iter(str(error).splitlines()), "")
            logger.warning("%s: %r is not used, as it raises %s: %s", key.op, name, type(error).__name__, reason)
            return math.inf

    def recall(self, times: Times) -> None:
        """Use recorded times, the same on all ranks. They count only for operations with the same candidates."""
        self._times = times

    def settle(self, gather: Callable[[Times], Iterable[Times]]) -> Times:
        """Let all ranks choose by the same times from now on. It is collective, between steps.

        Args:
            gather: returns the measured times of all ranks, in the order of ranks.

        Returns:
            The merged times of all ranks, the same on each.
        """
        measured = merge_times(gather(self._measured))
        for operation, by_octave in measured.items():
            self._times[operation] = self._times.get(operation, {}) | by_octave
        self._measured = {}
        self._is_open = self._is_alone
        self._chosen = {key: self._fastest(key, names) for key, names in self._names.items()}
        return measured

    def stop_measuring(self) -> None:
        """Choose by the known times from now on, for ranks without a common point to settle at."""
        self._is_open = False

    @property
    def choices(self) -> dict[TuningKey, str]:
        """Choices for the keys that occurred, each with the maximum rows of its octave."""
        return dict(self._chosen)


def merge_times(times_of_ranks: Iterable[Times]) -> Times:
    """Return the times of the slowest rank for each candidate: a candidate that raised on a rank is never chosen.

    Operations are left out if no candidate ran, or if two ranks had different candidates.
    """
    merged: Times = {}
    for times in times_of_ranks:
        for operation, by_octave in times.items():
            kept_times = merged.setdefault(operation, {})
            for octave, times_of_octave in by_octave.items():
                present = kept_times.get(octave, times_of_octave)
                has_same = times_of_octave.keys() == present.keys()
                kept_times[octave] = (
                    {name: max(ms, present[name]) for name, ms in times_of_octave.items()} if has_same else {}
                )
    return {
        operation: usable
        for operation, by_octave in merged.items()
        if (usable := {o: times_ms for o, times_ms in by_octave.items() if any(map(math.isfinite, times_ms.values()))})
    }


def _comparable(times: Times, operation: str, names: tuple[str, ...]) -> dict[int, CandidateTimes]:
    """Return the times of an operation by octave. Times of other candidates do not count."""
    return {octave: times_ms for octave, times_ms in times.get(operation, {}).items() if times_ms.keys() == set(names)}


def _text(value: Hashable) -> str:
    """Return a parameter of a shape as text."""
    if isinstance(value, tuple):
        return "x".join(map(_text, value))
    return str(value).removeprefix("torch.")


def _median_ms(candidate: Callable[[], object]) -> float:
    for _ in range(NUM_WARMUP_RUNS):
        candidate()
    times = []
    for _ in range(NUM_TIMED_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        candidate()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[NUM_TIMED_RUNS // 2]
