"""Scaling benchmark: tokens/s over tokens per rank, and time over the number of experts at equal active compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moefold.bench.our_step import our_step
from moefold.bench.shape import BenchShape, bench_config
from moefold.bench.timing import CLOCKS, StepTimes, synchronized, time_interleaved
from moefold.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class TokensPoint:
    """Result for one number of tokens."""

    tokens: int
    median_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class ExpertsPoint:
    """Result for one number of experts per layer, at constant top-k."""

    experts: int
    median_s: float
    ratio: float
    """Time relative to the smallest number of experts."""


@dataclass(frozen=True)
class ScalingSweep:
    """Values to sweep and measurement settings."""

    shape: BenchShape
    dtype: str
    tokens: Sequence[int]
    experts: Sequence[int]
    rounds: int
    clock: str


def sweep_tokens(
    sweep: ScalingSweep, device: torch.device, on_progress: ProgressCallback = ignore_progress
) -> list[TokensPoint]:
    """Time steps with increasing numbers of tokens, interleaved. A whole model needs a process group of size 1."""
    steps = {
        str(n): synchronized(
            our_step(
                bench_config(sweep.shape, dtype=sweep.dtype, tokens=n, device=device.type), sweep.shape.part, device
            ).build(),
            device,
        )
        for n in sweep.tokens
    }
    times_s = time_interleaved(
        steps,
        warmup=1,
        rounds=sweep.rounds,
        clock=CLOCKS[sweep.clock],
        on_progress=lambda text: on_progress(f"tokens, {text}"),
    )
    medians = [StepTimes(times_s[str(n)]).median_s for n in sweep.tokens]
    return [TokensPoint(n, s, n / s) for n, s in zip(sweep.tokens, medians, strict=True)]


def sweep_experts(
    sweep: ScalingSweep, device: torch.device, on_progress: ProgressCallback = ignore_progress
) -> list[ExpertsPoint]:
    """Time forward and backward of one MoE layer with increasing numbers of experts, interleaved."""
    shape = replace(sweep.shape, part="layer")
    steps = {}
    for count in sweep.experts:
        cfg = bench_config(shape, dtype=sweep.dtype, experts=count, device=device.type)
        steps[str(count)] = synchronized(our_step(cfg, "layer", device).build(), device)
    times_s = time_interleaved(
        steps,
        warmup=1,
        rounds=sweep.rounds,
        clock=CLOCKS[sweep.clock],
        on_progress=lambda text: on_progress(f"experts, {text}"),
    )
    medians = [StepTimes(times_s[str(n)]).median_s for n in sweep.experts]
    return [ExpertsPoint(n, s, s / medians[0]) for n, s in zip(sweep.experts, medians, strict=True)]
