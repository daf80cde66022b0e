"""Time our step with more tokens, and one MoE layer with more experts at equal active compute.

`python -m benchmarks.scaling --help` explains the options.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.program import add_report_options, check_report_options, run_program, write_report
from moefold.bench.our_step import our_step
from moefold.bench.shape import BenchShape, bench_config
from moefold.bench.timing import CLOCKS, StepTimes, describe_device, synchronized, time_interleaved
from moefold.cli.bench import device_type_from_args, shape_from_args
from moefold.cli.command_parser import CommandParser
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress

MS_PER_S = 1e3


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables. Return 0, and 2 for wrong options."""
    return run_program(_run, _parser(), argv)


def _run(args: argparse.Namespace) -> int:
    check_report_options(args)
    shape = shape_from_args(args)
    for tokens in args.tokens:
        bench_config(shape, dtype=args.dtype, tokens=tokens)
    for experts in args.experts:
        bench_config(shape, dtype=args.dtype, experts=experts)
    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


def _measure(shape: BenchShape, args: argparse.Namespace, rank_env: RankEnv, device_name: str) -> int:
    torch.set_num_threads(args.threads)
    sweep = ScalingSweep(shape, args.dtype, args.tokens, args.experts, args.steps, args.clock)
    with init_distributed(rank_env, device_name) as device, WorkProgress("scaling") as progress:
        by_tokens = sweep_tokens(sweep, device, progress.report)
        by_experts = sweep_experts(sweep, device, progress.report)
        machine = describe_device(device)
    report = {
        "kind": "scaling",
        "shape": args.shape,
        "dtype": args.dtype,
        "clock": args.clock,
        "rounds": args.steps,
        "machine": machine,
        "by_tokens": [asdict(point) for point in by_tokens],
        "by_experts": [asdict(point) for point in by_experts],
    }
    best = max(point.tokens_per_s for point in by_tokens)
    lines = [
        f"{args.shape}, {args.dtype}, {machine}, {args.clock} clock; medians of {args.steps} rounds in turn after 1"
    ]
    lines += ["", "    tokens        ms    tokens/s  of the best"]
    for point in by_tokens:
        lines.append(
            f"{point.tokens:10,}{point.median_s * MS_PER_S:10.1f}{point.tokens_per_s:12,.0f}"
            f"{point.tokens_per_s / best:13.1%}"
        )
    lines += ["", "one MoE layer, the same active compute", "   experts        ms   of the fewest"]
    lines += [f"{point.experts:10}{point.median_s * MS_PER_S:10.1f}{point.ratio:16.2f}" for point in by_experts]
    write_report(args, report, "\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.scaling",
        description="Time our step with increasing numbers of tokens, and one MoE layer with increasing numbers of "
        "experts at a constant top-k, in turn in one process.",
    )
    parser.add_argument("--shape", default="small", metavar="NAME", help="a shape of moefold bench (default small)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[2048, 4096, 8192, 16384],
        help="tokens per rank (2048 to 16384)",
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="(default 8 to 128)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time of all threads (default wall)"
    )
    parser.add_argument("--steps", type=int, default=7, help="measured rounds (default 7)")
    add_report_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
