"""Benchmark timing and memory: interleaved rounds in one process with medians, and peak bytes of tensor storages."""

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
    """Step times of one implementation, in seconds."""

    seconds: list[float]

    @property
    def median_s(self) -> float:
        """Median of the times."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile; minimum and maximum for fewer than four times."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high


Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Clocks by name; "cpu" is the CPU time of all threads of this process, for a machine with other load."""


def time_interleaved(
    steps: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, list[float]]:
    """Run every step once per round, after warm-up rounds; return the seconds of each round by name.

    Steps on a GPU must synchronise themselves: see `synchronized`.
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
    """Wrap a step so that it waits for the device."""

    def run() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def median_ratio(fast_s: list[float], slow_s: list[float]) -> float:
    """Return the median over the rounds of slow time over fast time."""
    return statistics.median(slow / fast for fast, slow in zip(fast_s, slow_s, strict=True))


class StorageMeter(TorchDispatchMode):
    """Dispatch mode that counts the live bytes of all storages that operations return.

    Attributes:
        peak_bytes: peak of the live bytes, without storages from before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_storages: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the new storages of its results."""
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
