"""`moefold bench leastloaded`: compare least-loaded dispatch with the plain all-to-all under skewed routing."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress
from moefold.terminal import print_escaped

if TYPE_CHECKING:
    from moefold.bench.least_loaded import DispatchMeasurement

NUM_EXPERTS = 16
NUM_RANKS = (2, 4, 8, 16)
MIB = 2**20


def run(argv: list[str]) -> int:
    """Run the benchmark on CPU ranks of this machine and print a table; return 0."""
    args = _parser().parse_args(argv)
    for name in ("steps", "tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    for skew in args.skew:
        if not 0 <= skew <= 1:
            raise ConfigError(f"--skew {skew:g} must lie in [0, 1]: it is a fraction of the tokens")
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, args), args.ranks, "cpu")


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    import torch

    from moefold.bench.least_loaded import SkewedWorkload, measure_dispatchers
    from moefold.comm.groups import ParallelGroups
    from moefold.launch.ranks import init_distributed
    from moefold.topology.layout import fold

    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("bench leastloaded", is_shown=rank_env.rank == 0) as progress,
    ):
        groups = ParallelGroups.create(fold(world_size=args.ranks, ep=args.ranks), device)
        found = measure_dispatchers(
            SkewedWorkload(args.tokens, num_experts=NUM_EXPERTS), args.skew, args.steps, groups, progress.report
        )
    if rank_env.rank == 0:
        print_escaped(_json(args, found) if args.json else _table(args, found), flush=True)
    return 0


def _json(args: argparse.Namespace, measurements: "list[DispatchMeasurement]") -> str:
    report = {"ranks": args.ranks, "tokens_per_rank": args.tokens, "steps": args.steps}
    return json.dumps(report | {"measurements": [asdict(measurement) for measurement in measurements]})


def _table(args: argparse.Namespace, measurements: "list[DispatchMeasurement]") -> str:
    lines = [
        f"{args.ranks} ranks, {args.tokens} tokens each, {NUM_EXPERTS} experts, top-1, float32, medians of "
        f"{args.steps} steps in turn, after 2",
        "maximum over the ranks; experts: forward and backward while the other ranks wait",
        "",
        "hot expert  dispatcher   step ms  rows  rows/mean  peak MiB   experts CPU ms  loans",
    ]
    for row in measurements:
        lines.append(
            f"{row.skew:9.0%}   {row.dispatcher:11} {row.step_s * 1e3:8.1f} {row.rows:5}  "
            f"{row.rows / row.mean_rows:9.2f}  {row.peak_bytes / MIB:8.1f}  "
            f"{row.experts_cpu_s * 1e3:16.1f}  {row.experts_moved:5}"
        )
    lines += ["", "leastloaded against alltoall", "hot expert  step time  peak memory  experts CPU"]
    for plain, ours in zip(measurements[::2], measurements[1::2], strict=True):
        ratios = (plain.step_s / ours.step_s, plain.peak_bytes / ours.peak_bytes)
        cpu = plain.experts_cpu_s / ours.experts_cpu_s
        lines.append(f"{plain.skew:9.0%}   {ratios[0]:8.2f}x  {ratios[1]:10.2f}x  {cpu:10.2f}x")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold bench leastloaded",
        description="Time one MoE layer, forward and backward, on CPU ranks when one expert receives most of the "
        "tokens: parallel.dispatcher=leastloaded compared with alltoall. Ranks that share cores also use the idle "
        "ranks' time: there the step time differs less than the rows and the CPU time of the experts do.",
    )
    parser.add_argument("--ranks", type=int, choices=NUM_RANKS, default=4, help="ranks of ep (default 4)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per rank (default 1024)")
    parser.add_argument(
        "--skew",
        type=float,
        nargs="+",
        default=[0.3, 0.5, 0.8, 0.95],
        metavar="PART",
        help="fractions of the tokens that one expert receives (default 0.3 0.5 0.8 0.95)",
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser
