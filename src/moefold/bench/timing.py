"""Timing contestants fairly on a noisy machine: in turn, in one process, medians.

How much memory tensors take at most: counted, because the size of a process says little about a single step.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moefold.comm.torch_compat import TorchDispatchMode, storage_key, tree_leaves
from moefold.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class StepTimes:
    """What a contestant took, in seconds."""

    seconds: list[float]

    @property
    def median_s(self) -> float:
        """The middle."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Between them lies the middle half; the extremes where there are fewer than four."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high


Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""The CPU time of all threads of this process says on a crowded machine what the wall clock says on an idle one."""


def time_interleaved(
    steps: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, list[float]]:
    """Run every contestant once a round, after some rounds that do not count; returns seconds by name.

    A contestant that works on a GPU waits for it itself: see `synchronized`.
    """
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warmup + rounds):
        on_progress(f"round {i + 1} of {warmup + rounds}")
        for name, step in steps.items():
            started_s = clock()
            step()
            if i >= warmup:
                times_s[name].append(clock() - started_s)
    return times_s


def synchronized(step: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The step, which is over when the device has done its work."""

    def run() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def median_ratio(fast_s: list[float], slow_s: list[float]) -> float:
    """Median over the rounds of how many times faster the first is, round by round."""
    return statistics.median(slow / fast for fast, slow in zip(fast_s, slow_s, strict=True))


class StorageMeter(TorchDispatchMode):
    """Inside, counts the bytes of all storages that operations return, from when they come to when they go.

    Attributes:
        peak_bytes: the most that lived at once; what lived before does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_storages: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        known = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._key(leaf) not in known:
                self._add(leaf.untyped_storage())
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        return storage_key(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._live_storages:
            return
        self._live_storages[key] = storage.nbytes()
        self._live_bytes += self._live_storages[key]
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._live_bytes -= self._live_storages.pop(key)
