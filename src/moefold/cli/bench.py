"""`moefold bench`: time our step next to the rates of the hardware."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.bench.shape import BenchShape, bench_config, bench_shapes, max_fitting_experts
from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.host.output_file import check_writable, refuse_existing
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import DEVICE_NAMES
from moefold.message_text import Setting, spelled_as
from moefold.progress import WorkProgress
from moefold.terminal import print_escaped

if TYPE_CHECKING:
    from moefold.bench.step_bench import StepReport

MS_PER_S = 1e3
CLOCK_NAMES = {"wall": "wall clock", "cpu": "CPU time of all threads"}


def run(argv: list[str]) -> int:
    """Run the benchmark and print its table, and return 0."""
    if argv[:1] and not argv[0].startswith("-"):
        raise ConfigError(
            f"moefold bench takes options only, and {argv[0]!r} is none; benchmarks of single features are programs "
            "of the repository: python -m benchmarks.NAME, see docs/performance.md"
        )
    args = _parser().parse_args(argv)
    shape = checked_shape(args)
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


def checked_shape(args: argparse.Namespace) -> BenchShape:
    """Return the shape of --shape, after checking the sizes, without importing torch."""
    shape = shape_from_args(args)
    bench_config(shape, dtype=args.dtype, tokens=args.tokens, experts=args.experts)
    return shape


def _measure(shape: BenchShape, args: argparse.Namespace, rank_env: RankEnv, device_name: str) -> int:
    import torch

    from moefold.bench.our_step import our_step
    from moefold.bench.step_bench import measure_step
    from moefold.bench.timing import free_memory_bytes
    from moefold.launch.ranks import init_distributed

    torch.set_num_threads(args.threads)
    with init_distributed(rank_env, device_name) as device, WorkProgress("bench") as progress:
        size = 2 if args.dtype == "bfloat16" else 4
        experts = args.experts or max_fitting_experts(shape, size, free_memory_bytes(device))
        cfg = bench_config(shape, dtype=args.dtype, tokens=args.tokens, experts=experts, device=device_name)
        progress.report("building the model")
        our_part = our_step(cfg, shape.part, device, args.routing)
        measured = measure_step(our_part, our_part.build(), args.steps, args.clock, progress.report)
    write_report(args, measured.as_dict() | {"shape": shape.name}, format_report(shape, measured))
    return 0


def format_report(shape: BenchShape, report: "StepReport", below: Sequence[str] = ()) -> str:
    """Format a report for the terminal, with lines below the table of steps."""
    lines = [
        f"{shape.name}: {report.tokens:,} tokens, {report.num_experts} experts, {report.routing} routing "
        f"(busiest expert {report.load:.2f} x mean), {report.dtype}",
        f"{report.machine}, torch {report.torch}; {CLOCK_NAMES[report.clock]}, medians of "
        f"{report.rounds} rounds in turn after 2",
        f"GEMM {report.gemm_tflops:.3g} TFLOP/s, copy {report.copy_gbps:.3g} GB/s",
        "",
        f"{'':30}  {'ms':>8}  {'quartiles':>17}  {'tokens/s':>10}  {'TFLOP/s':>8}  {'MFU':>6}  {'peak GiB':>8}",
    ]
    for row in report.rows:
        spread = f"{row.low_s * MS_PER_S:.1f} .. {row.high_s * MS_PER_S:.1f}"
        lines.append(
            f"  {row.name:28}  {row.median_s * MS_PER_S:8.1f}  {spread:>17}  {row.tokens_per_s:10,.0f}  "
            f"{row.tflops:8.3g}  {row.mfu:6.1%}  {row.peak_gib:8.3f}"
        )
    return "\n".join([*lines, *below])


def _parser() -> argparse.ArgumentParser:
    return step_parser(
        "moefold bench",
        "Time our training step, with the FLOP/s and bandwidth that the machine reaches in the same rounds. The shape "
        "`small` is a whole training step; the others are forward and backward of one MoE layer, or of two with "
        "attention.",
    )


def step_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of a step of a shape."""
    parser = CommandParser(prog, description, f"shapes: {', '.join(bench_shapes())}")
    parser.option("--shape", "small", "NAME", "what to compute, see below (default small)")
    parser.option("--tokens", 0, "N", "tokens per step (default: 2048 for small, else 4096)")
    parser.option("--experts", 0, "E", "experts per layer (default: as many as fit)")
    parser.option(
        "--routing",
        "natural",
        None,
        "an untrained router over random states, or states that load all experts equally (default natural)",
        choices=("natural", "balanced"),
    )
    parser.option(
        "--dtype", "float32", None, "dtype of the computation (default float32)", choices=("float32", "bfloat16")
    )
    parser.option("--device", "cpu", None, "default cpu", choices=("auto", "cpu", "cuda"))
    parser.option("--threads", 2, None, "CPU threads (default 2)")
    parser.option(
        "--clock",
        "wall",
        None,
        "cpu: CPU time of all threads, for machines with shared cores (default wall)",
        choices=("wall", "cpu"),
    )
    parser.option("--steps", 20, None, "measured rounds (default 20)")
    add_output_options(parser)
    return parser


def shape_from_args(args: argparse.Namespace) -> BenchShape:
    """Return the shape of --shape, after checking that the count options are positive."""
    check_output_options(args)
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    shapes = bench_shapes()
    if args.shape not in shapes:
        raise ConfigError(f"{Setting('--shape', args.shape)} is unknown; the shapes are {', '.join(shapes)}")
    return shapes[args.shape]


def device_type_from_args(args: argparse.Namespace) -> str:
    """Resolve --device, and check that the clock of --clock can time it. Imports torch."""
    from moefold.launch.ranks import choose_device

    with spelled_as(DEVICE_NAMES):
        device = choose_device(args.device, 1, None)
    if device == "cuda" and args.clock == "cpu":
        raise ConfigError("--clock cpu cannot time a GPU; leave it out, or set --device cpu")
    return device


def add_output_options(parser: CommandParser) -> None:
    """Add --json and --force."""
    parser.option("--json", str, "FILE", "write the report as JSON; - prints it instead of the table")
    parser.flag("--force", "replace files that exist")


def check_output_options(args: argparse.Namespace) -> None:
    """Check that the report can be written, before any measurement."""
    if args.json not in (None, "-"):
        check_writable("--json", Path(args.json))
        refuse_existing("--json", Path(args.json), force=args.force)


def write_report(args: argparse.Namespace, report: Mapping[str, Any], table: str) -> None:
    """Print the table, and write the report to the file of --json, if given."""
    text = json.dumps(report)
    print_escaped(text if args.json == "-" else table, flush=True)
    if args.json not in (None, "-"):
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: {error.strerror}") from None
