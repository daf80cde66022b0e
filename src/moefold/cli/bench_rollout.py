"""`moefold bench rollout`: compare generation by the rollout engine with transformers."""

import argparse
import json
import statistics
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moefold.cli.command_parser import CommandParser
from moefold.errors import ConfigError
from moefold.extras import install_command
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress
from moefold.terminal import print_escaped

if TYPE_CHECKING:
    from moefold.bench.rollout import ScenarioResult


def run(argv: list[str]) -> int:
    """Run the benchmark on one rank and print a table; return 0."""
    args = _parser().parse_args(argv)
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    if find_spec("transformers") is None:
        raise ConfigError(
            f"moefold bench rollout compares with transformers, which is missing: {install_command('hf')}"
        )
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, args), 1, "cpu")


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    import torch

    from moefold.bench.rollout import RolloutBench, make_scenarios, rollout_config
    from moefold.bench.timing import describe_device
    from moefold.launch.ranks import init_distributed

    torch.set_num_threads(args.threads)
    scenarios = make_scenarios()
    chosen = [scenario for name, scenario in scenarios.items() if any(part in name for part in args.only or [""])]
    if not chosen:
        raise ConfigError(f"--only {' '.join(args.only)} matches none of: {'; '.join(scenarios)}")
    with init_distributed(rank_env, device_type) as device, WorkProgress("bench rollout") as progress:
        bench = RolloutBench(rollout_config(args.preset, args.dtype), device)
        found = [bench.run(scenario, args.rounds, progress.report) for scenario in chosen]
        machine = describe_device(device)
    if args.json:
        report = {"preset": args.preset, "dtype": args.dtype, "machine": machine}
        print_escaped(json.dumps(report | {"scenarios": [asdict(result) for result in found]}), flush=True)
        return 0
    title = f"{args.preset}, {args.dtype}, {machine}; medians of {args.rounds} rounds in turn, after one"
    print_escaped("\n".join([title, *(line for result in found for line in _table(result))]), flush=True)
    return 0


def _table(result: "ScenarioResult") -> list[str]:
    lines = ["", f"{result.name:38}  {'CPU s':>8}  {'wall s':>8}  {'tokens/CPU s':>12}  {'CPU ratio':>9}  wall ratio"]
    for timing in result.timings:
        cpu_s = statistics.median(timing.cpu_s)
        ratios = result.ratio(timing)
        lines.append(
            f"  {timing.name:36}  {cpu_s:8.3f}  {statistics.median(timing.wall_s):8.3f}  "
            f"{result.num_new_tokens / cpu_s:12,.0f}  {ratios[0]:8.2f}x  {ratios[1]:9.2f}x"
        )
    return lines + [f"  {reason}" for reason in result.absent]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold bench rollout",
        description="Time generation by the rollout engine and, in turn in the same process, transformers' generate\n"
        "and continuous batching with the same random weights: 1, 8 and 64 samples, rollouts of log-normal lengths,\n"
        "and samples that share prompts against the same ones that do not.",
    )
    parser.add_argument("--preset", default="quickstart", help="model (default quickstart)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only scenarios whose name has one of these texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser
