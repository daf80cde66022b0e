"""A measured stage of benchmarks/gpu_half_hour.py: device, sizes, timers, the file of its rows, and its layers."""

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moefold.bench.shape import bench_config, bench_shapes
from moefold.config.edit import edit_model
from moefold.config.schema import Config

TINY_LAYER = {
    "hidden_size": 64,
    "ffn.moe.intermediate_size": 64,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 2,
    "attention.head_dim": 16,
    "ffn.moe.num_experts": 8,
    "ffn.moe.top_k": 2,
}
TINY_TOKENS = 64
TOP_KERNELS = 12


@dataclass
class Stage:
    """Device and sizes of a stage, the file of its rows, and wrong results. These fail the stage at its end."""

    device: torch.device
    is_tiny: bool
    rows: Path
    faults: list[str] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def add(self, name: str, value: float | str, unit: str = "", **details: object) -> None:
        """Print a row and append it to the file."""
        shown = value if isinstance(value, str) else f"{value:.4g}"
        print(f"{name}: {shown} {unit}", flush=True)
        with self.rows.open("a") as stream:
            stream.write(json.dumps({"name": name, "value": value, "unit": unit, **details}) + "\n")

    def size(self, large: int, small: int) -> int:
        """Return the first size, or with `--tiny` the second."""
        return small if self.is_tiny else large

    def ms(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return the median milliseconds of a run after two others, by CUDA events; on a CPU of one after another."""
        for _ in range(2 if self.is_cuda else 1):
            run()
        return statistics.median(self.one_ms(run) for _ in range(repeats if self.is_cuda else 1))

    def one_ms(self, run: Callable[[], object]) -> float:
        """Return the milliseconds of a run, by CUDA events; on a CPU by the wall clock."""
        if not self.is_cuda:
            started_s = time.perf_counter()
            run()
            return (time.perf_counter() - started_s) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def host_ms(self, run: Callable[[], object], repeats: int = 5) -> float:
        """Return the median milliseconds until a run returns, started with an idle device."""
        times = []
        for _ in range(repeats):
            self.synchronize()
            started_s = time.perf_counter()
            run()
            times.append((time.perf_counter() - started_s) * 1e3)
        self.synchronize()
        return statistics.median(times)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def peak_gib(self, run: Callable[[], object]) -> float:
        """Return the peak memory of a run beyond the memory that was allocated before, or 0 on a CPU."""
        if not self.is_cuda:
            run()
            return 0.0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**30

    def free(self) -> None:
        """Return cached memory to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Collect the source line of each wait of the host for the GPU inside the block; none without a GPU."""
    waits: list[str] = []
    if not torch.cuda.is_available():
        yield waits
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
        waits += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def profile(stage: Stage, run: Callable[[], object]) -> tuple[int, float, list[tuple[str, int, float]]]:
    """Profile a run: (launches, milliseconds in kernels, the longest kernels as (name, launches, ms)).

    On a CPU operators take the place of kernels.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if stage.is_cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        run()
        stage.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in profiler.events():
        if stage.is_cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        # The range of an optimizer step or of record_function covers kernels, but is not a kernel.
        if event.is_user_annotation:
            continue
        us = event.device_time_total if stage.is_cuda else event.self_cpu_time_total
        count, total = totals.get(event.name, (0, 0.0))
        totals[event.name] = (count + 1, total + us)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    launches = sum(count for _, (count, _) in ranked)
    busy_ms = sum(us for _, (_, us) in ranked) / 1e3
    return launches, busy_ms, [(name[:80], count, round(us / 1e3, 3)) for name, (count, us) in ranked[:TOP_KERNELS]]


def layer_config(stage: Stage, preset: str, tokens: int, **train: object) -> Config:
    """Return the recipe of one MoE layer in bfloat16."""
    tokens = stage.size(tokens, TINY_TOKENS)
    cfg = bench_config(bench_shapes()[f"{preset}-layer"], dtype="bfloat16", tokens=tokens, device=stage.device.type)
    model = edit_model(cfg.model, TINY_LAYER) if stage.is_tiny else cfg.model
    return replace(cfg, model=model, train=replace(cfg.train, **train))
