"""`moefold bench`: time our step, part by part and next to the limits of the hardware."""

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from moefold.bench.shape import BenchShape, bench_config, bench_shapes, max_fitting_experts
from moefold.cli.bench_output import add_output_options, device_type_from_args, shape_from_args, write_report
from moefold.cli.command_parser import CommandParser
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress

if TYPE_CHECKING:
    from moefold.bench.step_bench import StepReport

SUBCOMMANDS = {
    "dispatch": "parts of one MoE layer over ETP x EP, folded or not",
    "ranks": "where the ranks of a recipe spend a step",
    "scaling": "tokens/s over tokens, step time over experts",
    "leastloaded": "least-loaded dispatch under skewed routing",
    "documents": "context parallelism on packed documents",
    "plot": "plot a report of any of these commands",
}
MS_PER_S = 1e3
CLOCK_NAMES = {"wall": "wall clock", "cpu": "CPU time of all threads"}


def run(argv: list[str]) -> int:
    """Run the benchmark and print its tables; return 0."""
    if argv[:1] and argv[0] in SUBCOMMANDS:
        return int(importlib.import_module(f"moefold.cli.bench_{argv[0]}").run(argv[1:]))
    args = _parser().parse_args(argv)
    shape = checked_shape(args)
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


def checked_shape(args: argparse.Namespace) -> BenchShape:
    """Return the shape of --shape, after checking the sizes; imports no torch."""
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
        ours = our_step(cfg, shape.part, device, args.routing)
        found = measure_step(ours, ours.build(), args.steps, args.clock, progress.report)
    write_report(args, found.as_dict() | {"shape": shape.name}, format_report(shape, found))
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
    return "\n".join([*lines, *below, "", *_format_parts(report)])


def _format_parts(report: "StepReport") -> list[str]:
    ours_s = report.rows[0].median_s
    lines = [f"{'part of our step, by itself':30}  {'ms':>8}  {'of step':>7}  {'floor ms':>8}  {'gap':>6}"]
    for piece in report.pieces:
        gap = f"{piece.gap:5.1f}x" if piece.floor_s else "     -"
        lines.append(
            f"  {piece.name:28}  {piece.seconds * MS_PER_S:8.2f}  {piece.seconds / ours_s:7.1%}  "
            f"{piece.floor_s * MS_PER_S:8.2f}  {gap:>6}"
        )
    rest_s = ours_s - sum(piece.seconds for piece in report.pieces)
    lines.append(f"  {'the rest of the step':28}  {rest_s * MS_PER_S:8.2f}  {rest_s / ours_s:7.1%}")
    lines.append("  dispatch, collectives: none on one rank; see `moefold bench dispatch` and `moefold bench ranks`")
    lines.append(f"experts at {report.experts_of_bare_loop:.0%} of the rate of a bare loop of their GEMMs")
    return lines


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBCOMMANDS))
    return step_parser(
        "moefold bench",
        "Time our training step and its parts, with the FLOP/s and bandwidth that the machine reaches in the same "
        "rounds. The shape `small` is a whole training step; the others are forward and backward of one MoE layer, or "
        "of two with attention.",
        "subcommands, each with a --help:\n"
        + "\n".join(f"  moefold bench {name:{width}}  {summary}" for name, summary in SUBCOMMANDS.items())
        + "\n\n",
    )


def step_parser(prog: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of a benchmark of a step of a shape."""
    parser = CommandParser(prog=prog, description=description, epilog=f"{epilog}shapes: {', '.join(bench_shapes())}")
    parser.add_argument("--shape", default="small", metavar="NAME", help="what to compute, see below (default small)")
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="tokens per step (default: 2048 for small, else 4096)"
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        metavar="E",
        help="experts per layer (default: as many as fit)",
    )
    parser.add_argument(
        "--routing",
        choices=("natural", "balanced"),
        default="natural",
        help="an untrained router over random states, or states that load all experts equally (default natural)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the computation (default float32)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU time of all threads, for machines with shared cores (default wall)",
    )
    parser.add_argument("--steps", type=int, default=20, help="measured rounds (default 20)")
    add_output_options(parser)
    return parser
