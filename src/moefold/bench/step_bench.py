"""Benchmark of our step on one device: its speed, the time of its parts, and the machine's peak rates."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.bench.breakdown import BARE_GEMM_LOOP, PartTime, StepBreakdown, bare_loop_ratio, part_time
from moefold.bench.our_step import OURS, LayerStep, ModelStep, StepFunction
from moefold.bench.shape import step_flops
from moefold.bench.timing import (
    CLOCKS,
    PeakRates,
    StepTimes,
    StorageMeter,
    describe_device,
    peak_rates,
    repeat_short_step,
    roofline_kernels,
    synchronized,
    time_interleaved,
)
from moefold.model.transformer import TORCH_DTYPES
from moefold.progress import ProgressCallback, ignore_progress

GIB = 2**30


@dataclass(frozen=True)
class ImplementationResult:
    """Result of one implementation."""

    name: str
    median_s: float
    low_s: float
    """Lower quartile; `high_s` is the upper quartile."""
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
    """Results of our step, and of the steps that ran in turn with it."""

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
    """Ours first."""
    pieces: list[PartTime]
    experts_of_bare_loop: float
    """Speed of our experts relative to the bare loop of their GEMMs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON, with the gaps of the parts."""
        report = {"kind": "step", **asdict(self)}
        for piece, values in zip(self.pieces, report["pieces"], strict=True):
            values["gap"] = piece.gap if piece.floor_s else None
        return report


def measure_step(
    ours: ModelStep | LayerStep,
    run: StepFunction,
    rounds: int,
    clock: str = "wall",
    on_progress: ProgressCallback = ignore_progress,
    others: Mapping[str, StepFunction] | None = None,
) -> StepReport:
    """Time our step, its parts, the roofline kernels and the steps of others in the same rounds.

    Args:
        ours: our step.
        run: what `ours.build()` returned.
        rounds: measured rounds, after 2 that do not count.
        clock: name of a clock of `CLOCKS`.
        on_progress: called with progress messages.
        others: further steps by name.
    """
    cfg = ours.cfg
    device = ours.device
    steps = {name: synchronized(step, device) for name, step in {OURS: run, **(others or {})}.items()}
    breakdown = _step_breakdown(ours, run)
    parts = breakdown.parts()
    timed: dict[str, Callable[[], None]] = {**steps}
    timed |= {
        name: synchronized(kernel, device)
        for name, kernel in roofline_kernels(TORCH_DTYPES[cfg.run.dtype], device).items()
    }
    timed[BARE_GEMM_LOOP] = synchronized(breakdown.bare_gemm_loop(), device)
    repeated = {x.name: repeat_short_step(x.run, device, CLOCKS[clock]) for x in parts}
    timed |= {_part_key(name): step.run for name, step in repeated.items()}
    times_s = time_interleaved(timed, warmup=2, rounds=rounds, clock=CLOCKS[clock], on_progress=on_progress)
    on_progress("measuring memory")
    medians = {name: StepTimes(seconds).median_s for name, seconds in times_s.items()}
    rates = peak_rates(medians, device)
    rows = [_implementation_result(name, times_s[name], step, ours, rates) for name, step in steps.items()]
    part_times = [
        part_time(step_part, medians[_part_key(step_part.name)] / repeated[step_part.name].repeats, rates)
        for step_part in parts
    ]
    return StepReport(
        machine=describe_device(device),
        torch=torch.__version__,
        dtype=cfg.run.dtype,
        tokens=cfg.train.tokens_per_step,
        num_experts=cfg.model.experts.num_experts,
        routing=ours.routing,
        load=ours.expert_load(),
        rounds=rounds,
        clock=clock,
        gemm_tflops=rates.flops_per_s / 1e12,
        copy_gbps=rates.bytes_per_s / 1e9,
        rows=rows,
        pieces=part_times,
        experts_of_bare_loop=bare_loop_ratio(part_times, medians[BARE_GEMM_LOOP], cfg.model.num_layers),
    )


def _part_key(name: str) -> str:
    return f"part: {name}"


def _implementation_result(
    name: str,
    seconds: list[float],
    step: Callable[[], None],
    ours: ModelStep | LayerStep,
    peak_rates: PeakRates,
) -> ImplementationResult:
    times = StepTimes(seconds)
    flops_per_s = step_flops(ours.cfg.model, ours.cfg.train, ours.part) / times.median_s
    return ImplementationResult(
        name=name,
        median_s=times.median_s,
        low_s=times.quartiles_s[0],
        high_s=times.quartiles_s[1],
        rounds_s=seconds,
        tokens_per_s=ours.cfg.train.tokens_per_step / times.median_s,
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / peak_rates.flops_per_s,
        peak_gib=_peak_bytes(step, ours.device) / GIB,
    )


def _peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with StorageMeter() as meter:
        step()
    peak_bytes: int = meter.peak_bytes
    return peak_bytes


def _step_breakdown(ours: ModelStep | LayerStep, run: StepFunction) -> StepBreakdown:
    """Build the breakdown with the input states of the first router in our step."""
    inputs: list[Tensor] = []
    router = ours.first_moe_layer.router
    handle = router.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    run()
    handle.remove()
    x = inputs[0].view(ours.cfg.train.seq_len, ours.cfg.train.global_batch_size, -1)
    return StepBreakdown(ours.cfg, ours.part, ours.device, x, router.weight.detach())
