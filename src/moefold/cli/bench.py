"""`moefold bench`: compare our step with plain torch and transformers, part by part and with the hardware's limits."""

import argparse
import importlib
from functools import partial
from typing import TYPE_CHECKING

from moefold.bench.shape import BenchShape, bench_config, bench_shapes, max_fitting_experts
from moefold.cli.bench_output import add_output_options, device_type_from_args, shape_from_args, write_report
from moefold.cli.command_parser import CommandParser
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress

if TYPE_CHECKING:
    from moefold.bench.comparison import BenchComparison

SUBCOMMANDS = {
    "dispatch": "parts of one MoE layer over ETP x EP, folded or not",
    "ranks": "where the ranks of a recipe spend a step",
    "scaling": "tokens/s over tokens, step time over experts",
    "leastloaded": "least-loaded dispatch under skewed routing",
    "documents": "context parallelism on packed documents",
    "rollout": "generation by the rollout engine against transformers",
    "plot": "plot a report of any of these commands",
}
MS_PER_S = 1e3
CLOCK_NAMES = {"wall": "wall clock", "cpu": "CPU time of all threads"}


def run(argv: list[str]) -> int:
    """Run the benchmark and print its tables; return 0."""
    if argv[:1] and argv[0] in SUBCOMMANDS:
        return int(importlib.import_module(f"moefold.cli.bench_{argv[0]}").run(argv[1:]))
    args = _parser().parse_args(argv)
    shape = shape_from_args(args)
    # Report wrong sizes before torch is imported.
    bench_config(shape, dtype=args.dtype, tokens=args.tokens, experts=args.experts)
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


def _measure(shape: BenchShape, args: argparse.Namespace, rank_env: RankEnv, device_name: str) -> int:
    import torch

    from moefold.bench.comparison import compare_implementations
    from moefold.bench.other_frameworks import num_weight_copies
    from moefold.bench.timing import free_memory_bytes
    from moefold.launch.ranks import init_distributed

    torch.set_num_threads(args.threads)
    with init_distributed(rank_env, device_name) as device, WorkProgress("bench") as progress:
        size = 2 if args.dtype == "bfloat16" else 4
        whole = bench_config(shape, dtype=args.dtype)
        copies = num_weight_copies(whole, shape.part, device)
        experts = args.experts or max_fitting_experts(shape, size, free_memory_bytes(device), copies)
        cfg = bench_config(shape, dtype=args.dtype, tokens=args.tokens, experts=experts, device=device_name)
        found = compare_implementations(cfg, shape.part, args.routing, device, args.steps, args.clock, progress.report)
    report = found.as_dict() | {"shape": shape.name}
    write_report(args, report, format_comparison(shape, found))
    return 0


def format_comparison(shape: BenchShape, comparison: "BenchComparison") -> str:
    """Format a comparison for the terminal."""
    lines = [
        f"{shape.name}: {comparison.tokens:,} tokens, {comparison.num_experts} experts, {comparison.routing} routing "
        f"(busiest expert {comparison.load:.2f} x mean), {comparison.dtype}",
        f"{comparison.machine}, torch {comparison.torch}; {CLOCK_NAMES[comparison.clock]}, medians of "
        f"{comparison.rounds} rounds in turn after 2",
        f"GEMM {comparison.gemm_tflops:.3g} TFLOP/s, copy {comparison.copy_gbps:.3g} GB/s",
        "",
        f"{'':30}  {'ms':>8}  {'quartiles':>17}  {'tokens/s':>10}  {'TFLOP/s':>8}  {'MFU':>6}  {'peak GiB':>8}",
    ]
    for row in comparison.rows:
        spread = f"{row.low_s * MS_PER_S:.1f} .. {row.high_s * MS_PER_S:.1f}"
        lines.append(
            f"  {row.name:28}  {row.median_s * MS_PER_S:8.1f}  {spread:>17}  {row.tokens_per_s:10,.0f}  "
            f"{row.tflops:8.3g}  {row.mfu:6.1%}  {row.peak_gib:8.3f}"
        )
    lines += [f"  {reason}" for reason in comparison.absent]
    lines += [f"ratio to transformers: {comparison.ratio_to_transformers:.3f}"]
    if comparison.ratio_to_plain is not None:
        lines.append(f"ratio to plain torch: {comparison.ratio_to_plain:.3f}")
    lines += [f"ratio to {name}: {ratio:.3f}" for name, ratio in comparison.ratios_to_peers.items()]
    return "\n".join([*lines, "", *_format_parts(comparison)])


def _format_parts(comparison: "BenchComparison") -> list[str]:
    ours_s = comparison.ours.median_s
    lines = [f"{'part of our step, by itself':30}  {'ms':>8}  {'of step':>7}  {'floor ms':>8}  {'gap':>6}"]
    for piece in comparison.pieces:
        gap = f"{piece.gap:5.1f}x" if piece.floor_s else "     -"
        lines.append(
            f"  {piece.name:28}  {piece.seconds * MS_PER_S:8.2f}  {piece.seconds / ours_s:7.1%}  "
            f"{piece.floor_s * MS_PER_S:8.2f}  {gap:>6}"
        )
    rest_s = ours_s - sum(piece.seconds for piece in comparison.pieces)
    lines.append(f"  {'the rest of the step':28}  {rest_s * MS_PER_S:8.2f}  {rest_s / ours_s:7.1%}")
    lines.append("  dispatch, collectives: none on one rank; see `moefold bench dispatch` and `moefold bench ranks`")
    lines.append(f"experts at {comparison.experts_of_bare_loop:.0%} of the rate of a bare loop of their GEMMs")
    return lines


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBCOMMANDS))
    parser = CommandParser(
        prog="moefold bench",
        description="Time our training step and, in turn in the same process, plain torch and transformers' fastest "
        "experts implementation, with the FLOP/s and bandwidth that the machine reaches in the same rounds. The "
        "shape `small` is a whole training step; the others are forward and backward of one MoE layer, or of two with "
        "attention. With moefold[peers] the layers of megatron-core and torchtitan join the shapes that end in -layer.",
        epilog="subcommands, each with a --help:\n"
        + "\n".join(f"  moefold bench {name:{width}}  {summary}" for name, summary in SUBCOMMANDS.items())
        + f"\n\nshapes: {', '.join(bench_shapes())}",
    )
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
