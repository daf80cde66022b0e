"""Benchmark comparison on one device: implementations, breakdown of our step, and the machine's peak rates."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.bench.breakdown import BARE_GEMM_LOOP, PartTime, StepBreakdown, bare_loop_ratio, part_time
from moefold.bench.implementations import EXPERTS_IMPLEMENTATIONS, OURS, Competitors, build_competitors
from moefold.bench.shape import BenchPart, BenchRouting, step_flops
from moefold.bench.timing import (
    CLOCKS,
    COPY,
    ONEDNN,
    TORCH_MM,
    PeakRates,
    StepTimes,
    StorageMeter,
    describe_device,
    median_ratio,
    peak_rates,
    repeat_short_step,
    roofline_kernels,
    synchronized,
    time_interleaved,
)
from moefold.config.schema import Config
from moefold.model.transformer import TORCH_DTYPES
from moefold.progress import ProgressCallback, ignore_progress

GIB = 2**30
ROOFLINE_KERNELS = (COPY, TORCH_MM, ONEDNN)
TRANSFORMERS_VARIANTS = tuple(f"transformers, {kind}" for kind in EXPERTS_IMPLEMENTATIONS)


@dataclass(frozen=True)
class ImplementationResult:
    """Result of one implementation."""

    name: str
    median_s: float
    low_s: float
    """Lower quartile; `high_s` is the upper quartile."""
    high_s: float
    tokens_per_s: float
    tflops: float
    mfu: float
    """FLOP/s relative to the GEMM rate of the same run."""
    peak_gib: float
    """Peak memory of a step in addition to weights and moments."""


@dataclass(frozen=True)
class BenchComparison:
    """Results of a benchmark comparison."""

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
    absent: list[str]
    ratio_to_transformers: float
    """Median over the rounds of the time of transformers' faster implementation over ours."""
    ratio_to_plain: float | None
    ratios_to_peers: dict[str, float]
    pieces: list[PartTime]
    experts_of_bare_loop: float
    """Speed of our experts relative to the bare loop of their GEMMs."""

    @property
    def ours(self) -> ImplementationResult:
        """Result of our implementation."""
        return next(row for row in self.rows if row.name == OURS)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON, with the gaps of the parts."""
        report = {"kind": "comparison", **asdict(self)}
        for piece, values in zip(self.pieces, report["pieces"], strict=True):
            values["gap"] = piece.gap if piece.floor_s else None
        return report


def compare_implementations(
    cfg: Config,
    part: BenchPart,
    routing: BenchRouting,
    device: torch.device,
    rounds: int,
    clock: str = "wall",
    on_progress: ProgressCallback = ignore_progress,
) -> BenchComparison:
    """Time all implementations, the roofline kernels and the parts of our step in the same rounds.

    The slower of transformers' experts implementations is dropped after a short comparison of the two.
    """
    on_progress("building the models")
    competitors = build_competitors(cfg, part, routing, device)
    steps = {name: synchronized(step, device) for name, step in competitors.steps.items()}
    on_progress("choosing the faster of transformers' implementations")
    quick = time_interleaved(
        {name: steps[name] for name in TRANSFORMERS_VARIANTS}, warmup=1, rounds=2, clock=CLOCKS[clock]
    )
    fastest = min(TRANSFORMERS_VARIANTS, key=lambda name: min(quick[name]))
    for name in TRANSFORMERS_VARIANTS:
        if name != fastest:
            del steps[name]
    breakdown = _step_breakdown(cfg, part, device, competitors)
    parts = breakdown.parts()
    timed: dict[str, Callable[[], None]] = {**steps}
    timed |= {
        name: synchronized(run, device) for name, run in roofline_kernels(TORCH_DTYPES[cfg.run.dtype], device).items()
    }
    timed[BARE_GEMM_LOOP] = synchronized(breakdown.bare_gemm_loop(), device)
    repeated = {x.name: repeat_short_step(x.run, device, CLOCKS[clock]) for x in parts}
    timed |= {_part_key(name): step.run for name, step in repeated.items()}
    times_s = time_interleaved(timed, warmup=2, rounds=rounds, clock=CLOCKS[clock], on_progress=on_progress)
    on_progress("measuring memory")
    medians = {name: StepTimes(seconds).median_s for name, seconds in times_s.items()}
    rates = peak_rates(medians, device)
    rows = [_implementation_result(name, times_s[name], step, cfg, part, rates, device) for name, step in steps.items()]
    part_times = [
        part_time(step_part, medians[_part_key(step_part.name)] / repeated[step_part.name].repeats, rates)
        for step_part in parts
    ]
    plain = [name for name in steps if name.startswith("plain")]
    best_plain = min(plain, key=lambda name: medians[name]) if plain else None
    return BenchComparison(
        machine=describe_device(device),
        torch=torch.__version__,
        dtype=cfg.run.dtype,
        tokens=cfg.tokens_per_step,
        num_experts=cfg.model.num_experts,
        routing=routing,
        load=competitors.expert_load(),
        rounds=rounds,
        clock=clock,
        gemm_tflops=rates.flops_per_s / 1e12,
        copy_gbps=rates.bytes_per_s / 1e9,
        rows=rows,
        absent=competitors.absent,
        ratio_to_transformers=median_ratio(times_s[OURS], times_s[fastest]),
        ratio_to_plain=None if best_plain is None else median_ratio(times_s[OURS], times_s[best_plain]),
        ratios_to_peers={name: median_ratio(times_s[OURS], times_s[name]) for name in competitors.peers},
        pieces=part_times,
        experts_of_bare_loop=bare_loop_ratio(part_times, medians[BARE_GEMM_LOOP], cfg.model.num_layers),
    )


def _part_key(name: str) -> str:
    return f"part: {name}"


def _implementation_result(
    name: str,
    seconds: list[float],
    step: Callable[[], None],
    cfg: Config,
    part: BenchPart,
    peak_rates: PeakRates,
    device: torch.device,
) -> ImplementationResult:
    times = StepTimes(seconds)
    flops_per_s = step_flops(cfg, part) / times.median_s
    return ImplementationResult(
        name=name,
        median_s=times.median_s,
        low_s=times.quartiles_s[0],
        high_s=times.quartiles_s[1],
        tokens_per_s=cfg.tokens_per_step / times.median_s,
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / peak_rates.flops_per_s,
        peak_gib=_peak_bytes(step, device) / GIB,
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


def _step_breakdown(cfg: Config, part: BenchPart, device: torch.device, competitors: Competitors) -> StepBreakdown:
    """Build the breakdown with the input states of the first router in our step."""
    inputs: list[Tensor] = []
    router = competitors.first_moe_layer.router
    handle = router.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    competitors.steps[OURS]()
    handle.remove()
    x = inputs[0].view(cfg.train.seq_len, cfg.train.global_batch_size, -1)
    return StepBreakdown(cfg, part, device, x, router.weight.detach())
