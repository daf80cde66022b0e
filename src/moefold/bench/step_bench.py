"""Benchmark of our step on one device: its speed, and the machine's peak rates."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moefold.bench.our_step import OURS, LayerStep, ModelStep, StepFunction
from moefold.bench.shape import step_flops
from moefold.bench.timing import (
    CLOCKS,
    PeakRates,
    StepTimes,
    StorageMeter,
    describe_device,
    peak_rates,
    roofline_kernels,
    synchronized,
    time_interleaved,
)
from moefold.model.transformer import TORCH_DTYPES
from moefold.progress import ProgressCallback, ignore_progress
from moefold.units import GIB


@dataclass(frozen=True)
class ImplementationResult:
    """Result of one implementation."""

    name: str
    median_s: float
    low_s: float
    """Lower quartile. `high_s` is the upper quartile."""
    high_s: float
    rounds_s: list[float]
    tokens_per_s: float
    tflops: float
    mfu: float
    """FLOP/s relative to the GEMM rate of the same run."""
    peak_gib: float
    """Peak memory of a step in addition to weights and moments."""


@dataclass(frozen=True)
class StepReport:
    """Results of our step, and of the steps that were timed in the same rounds."""

    machine: str
    torch: str
    dtype: str
    tokens: int
    num_experts: int
    routing: str
    load: float
    """Routed tokens of the most loaded expert over the mean, in the first MoE layer."""
    rounds: int
    clock: str
    gemm_tflops: float
    copy_gbps: float
    rows: list[ImplementationResult]
    """Results of all implementations, ours first."""
    kernels_s: dict[str, float]
    """Median seconds of the GEMMs, of the copy and of the further kernels, by name."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {"kind": "step", **asdict(self)}


def measure_step(
    our_step: ModelStep | LayerStep,
    run: StepFunction,
    rounds: int,
    clock: str = "wall",
    on_progress: ProgressCallback = ignore_progress,
    other_steps: Mapping[str, StepFunction] | None = None,
    kernels: Mapping[str, Callable[[], None]] | None = None,
) -> StepReport:
    """Time our step, the roofline kernels, the steps of others and further kernels in the same rounds.

    Args:
        run: return value of `ours.build()`.
        rounds: measured rounds, after 2 warm-up rounds.
        clock: name of a clock of `CLOCKS`.
        kernels: further kernels by name, which wait for the device.
    """
    cfg = our_step.cfg
    device = our_step.device
    steps = {name: synchronized(step, device) for name, step in {OURS: run, **(other_steps or {})}.items()}
    roofline = roofline_kernels(TORCH_DTYPES[cfg.run.dtype], device)
    kernels = {name: synchronized(kernel, device) for name, kernel in roofline.items()} | dict(kernels or {})
    timed = {**steps, **kernels}
    times_s = time_interleaved(timed, warmup=2, rounds=rounds, clock=CLOCKS[clock], on_progress=on_progress)
    on_progress("measuring memory")
    kernels_s = {name: StepTimes(times_s[name]).median_s for name in kernels}
    rates = peak_rates(kernels_s, device)
    return StepReport(
        machine=describe_device(device),
        torch=torch.__version__,
        dtype=cfg.run.dtype,
        tokens=cfg.train.tokens_per_step,
        num_experts=cfg.model.experts.num_experts,
        routing=our_step.routing,
        load=our_step.expert_load(),
        rounds=rounds,
        clock=clock,
        gemm_tflops=rates.flops_per_s / 1e12,
        copy_gbps=rates.bytes_per_s / 1e9,
        rows=[_implementation_result(name, times_s[name], step, our_step, rates) for name, step in steps.items()],
        kernels_s=kernels_s,
    )


def _implementation_result(
    name: str,
    seconds: list[float],
    step: Callable[[], None],
    our_step: ModelStep | LayerStep,
    peak_rates: PeakRates,
) -> ImplementationResult:
    times = StepTimes(seconds)
    flops_per_s = step_flops(our_step.cfg.model, our_step.cfg.train, our_step.part) / times.median_s
    return ImplementationResult(
        name=name,
        median_s=times.median_s,
        low_s=times.quartiles_s[0],
        high_s=times.quartiles_s[1],
        rounds_s=seconds,
        tokens_per_s=our_step.cfg.train.tokens_per_step / times.median_s,
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / peak_rates.flops_per_s,
        peak_gib=_peak_bytes(step, our_step.device) / GIB,
    )


def _peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with StorageMeter() as meter:
        step()
    return meter.peak_bytes
