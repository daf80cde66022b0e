"""Benchmark timing and memory: interleaved rounds, storage peaks and a roofline."""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moefold.comm.private_torch import TorchDispatchMode, storage_key, tree_leaves
from moefold.launch.threads_and_malloc import malloc_message
from moefold.ops.gemm import TORCH_GEMM
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
        """Lower and upper quartile, or minimum and maximum for fewer than four times."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high


Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Clocks by name. "cpu" is the CPU time of all threads of this process, for a machine with other load."""


def time_interleaved(
    steps: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, list[float]]:
    """Run every step once per round, after warm-up rounds, and return the seconds of each round by name.

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
    """Return a step that waits for the device at its end."""

    def run() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


class StorageMeter(TorchDispatchMode):
    """Dispatch mode that counts the live bytes of all storages that operations return, without storages from before."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_storages: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the new storages of its results."""
        result = func(*args, **(kwargs or {}))
        inputs = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._key(leaf) not in inputs:
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


GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Size of the copy, larger than every cache."""
TORCH_MM = "GEMM, torch.mm"
ONEDNN = "GEMM, oneDNN"
COPY = "copy"


@dataclass(frozen=True)
class PeakRates:
    """Measured peak rates of the machine."""

    flops_per_s: float
    """FLOP/s of a large square GEMM, by the faster library."""
    bytes_per_s: float
    """Bytes/s, read and written, of a large copy."""


def roofline_kernels(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the GEMM and copy kernels for `peak_rates`, to be timed together with the implementations."""
    n = GEMM_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    kernels: dict[str, Callable[[], object]] = {COPY: lambda: target.copy_(source)}
    has_onednn = TORCH_GEMM.is_faster_than_torch_mm(a)
    if not has_onednn or dtype == torch.float32:
        # Where bfloat16 is emulated, torch.mm would take seconds and is never the faster library.
        kernels[TORCH_MM] = lambda: torch.mm(a, b)
    if has_onednn:
        kernels[ONEDNN] = lambda: TORCH_GEMM.matmul(a, b)
    return kernels


def peak_rates(median_s: dict[str, float], device: torch.device) -> PeakRates:
    """Compute the peak rates from the median times of `roofline_kernels`."""
    flops = 2 * GEMM_SIZE[device.type] ** 3
    fastest = min(median_s[name] for name in (TORCH_MM, ONEDNN) if name in median_s)
    return PeakRates(flops / fastest, 2 * COPY_BYTES[device.type] / median_s[COPY])


def free_memory_bytes(device: torch.device) -> float:
    """Return the free memory of the device, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import os

    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def describe_device(device: torch.device) -> str:
    """Return a description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()] if cpuinfo.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in lines}
    # On a virtual machine the model name is often only the name of the vendor.
    numbers = [f"{key} {facts[name]}" for key, name in (("family", "cpu family"), ("model", "model")) if name in facts]
    family = f" ({', '.join(numbers)})" if numbers else ""
    texts = (
        f"{facts.get('model name', 'CPU')}{family}",
        f"{torch.get_num_threads()} threads",
        malloc_message(device.type),
    )
    return ", ".join(filter(None, texts))
