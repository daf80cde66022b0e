"""`moefold bench dispatch`: time one MoE layer by part, over mappings of it on this machine's ranks."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from moefold.cli.bench_output import add_output_options, check_output_options, write_report
from moefold.cli.command_parser import CommandParser
from moefold.errors import DEVICE_OPTION, ConfigError, reworded_errors
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress

if TYPE_CHECKING:
    from moefold.bench.dispatch import MappingTime

MS_PER_S = 1e3
TITLES = {"etp": "ETP x EP at a fixed product", "context": "CP x EP, folded and coupled"}


def run(argv: list[str]) -> int:
    """Run the benchmark on the ranks of this machine and print its tables; return 0."""
    args = _parser().parse_args(argv)
    for name in ("ranks", "tokens", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.hidden < 64 or args.hidden % 64:
        raise ConfigError(f"--hidden {args.hidden} must be a multiple of 64: fine-grained experts have a quarter of it")
    check_output_options(args)
    from moefold.launch.ranks import choose_device, spawn_ranks

    with reworded_errors(*DEVICE_OPTION):
        device_type = choose_device(args.device, args.ranks, None)
    return spawn_ranks(partial(_measure, args), args.ranks, device_type)


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    import torch

    from moefold.bench.dispatch import measure_mappings
    from moefold.bench.timing import describe_device
    from moefold.launch.ranks import init_distributed
    from moefold.model.transformer import TORCH_DTYPES

    if device_type == "cpu":
        torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("bench dispatch", is_shown=rank_env.rank == 0) as progress,
    ):
        dtype = TORCH_DTYPES[args.dtype]
        bars = measure_mappings(args.ranks, args.tokens, args.hidden, args.steps, dtype, device, progress.report)
        machine = describe_device(device)
    if rank_env.rank == 0:
        report = {
            "kind": "dispatch",
            "ranks": args.ranks,
            "tokens": args.tokens,
            "hidden_size": args.hidden,
            "dtype": args.dtype,
            "rounds": args.steps,
            "machine": machine,
            "bars": [asdict(bar) for bar in bars],
        }
        write_report(args, report, _tables(args, machine, bars))
    return 0


def _tables(args: argparse.Namespace, machine: str, bars: "list[MappingTime]") -> str:
    lines = [
        f"One MoE layer, forward and backward, on {args.ranks} ranks with {args.tokens:,} tokens each, "
        f"H={args.hidden}, {args.dtype}; ms, medians of {args.steps} rounds in turn after 1",
        f"{machine} per rank; parts: mean over the ranks, including waits for other ranks; all: the slowest rank",
    ]
    for study, title in TITLES.items():
        for experts in dict.fromkeys(bar.experts for bar in bars if bar.study == study):
            mine = [bar for bar in bars if (bar.study, bar.experts) == (study, experts)]
            lines += ["", f"{title}: {experts}"]
            lines.append("  " + " " * 18 + "".join(f"{part:>11}" for part in (*mine[0].parts_s, "all")))
            for bar in mine:
                numbers = "".join(f"{s * MS_PER_S:11.2f}" for s in (*bar.parts_s.values(), bar.total_s))
                lines.append(f"  {bar.name:18}{numbers}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold bench dispatch",
        description="Time one MoE layer by part on ranks of this machine: over all ways to split them between ETP and "
        "EP, and over CP x EP with EP folded over the ranks of CP or coupled to DP, with few large experts and many "
        "small ones. Ranks of one machine are equally close: the benchmark cannot show the savings between nodes.",
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes, or GPUs (default 4)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per rank (default 1024)")
    parser.add_argument("--hidden", type=int, default=256, metavar="H", help="hidden size (default 256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--steps", type=int, default=7, help="measured rounds (default 7)")
    add_output_options(parser)
    return parser
