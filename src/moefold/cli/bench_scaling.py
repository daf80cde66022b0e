"""`moefold bench scaling`: measure how cost grows with tokens and with experts."""

import argparse
from dataclasses import asdict
from functools import partial

from moefold.bench.shape import BenchShape, bench_config
from moefold.cli.bench_output import add_output_options, device_type_from_args, shape_from_args, write_report
from moefold.cli.command_parser import CommandParser
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress

MS_PER_S = 1e3


def run(argv: list[str]) -> int:
    """Run the benchmark and print two tables; return 0."""
    args = _parser().parse_args(argv)
    shape = shape_from_args(args)
    for tokens in args.tokens:
        bench_config(shape, dtype=args.dtype, tokens=tokens)
    for experts in args.experts:
        bench_config(shape, dtype=args.dtype, experts=experts)
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


def _measure(shape: BenchShape, args: argparse.Namespace, rank_env: RankEnv, device_name: str) -> int:
    import torch

    from moefold.bench.scaling import ScalingSweep, sweep_experts, sweep_tokens
    from moefold.bench.timing import describe_device
    from moefold.launch.ranks import init_distributed

    torch.set_num_threads(args.threads)
    sweep = ScalingSweep(shape, args.dtype, args.tokens, args.experts, args.steps, args.clock)
    with init_distributed(rank_env, device_name) as device, WorkProgress("bench scaling") as progress:
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
        prog="moefold bench scaling",
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
    add_output_options(parser)
    return parser
