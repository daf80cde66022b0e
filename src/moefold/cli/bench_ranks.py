"""`moefold bench ranks`: measure where the ranks of a recipe spend the time of a step."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.bench_output import add_output_options, check_output_options, write_report
from moefold.cli.command_parser import CommandParser
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.config.schema import Config
from moefold.config.train import TrainConfig
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.progress import WorkProgress
from moefold.recipe import load_config
from moefold.validate.config import check_config

if TYPE_CHECKING:
    from moefold.bench.ranks import RankCpuTimes

FOLDED_MAPPING = ("parallel.world_size=8", "parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4")
DEFAULT_OVERRIDES = (
    "model.preset=quickstart",
    *FOLDED_MAPPING,
    "run.device=cpu",
    "run.dtype=float32",
    "train.seq_len=256",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
)
MS_PER_S = 1e3


def run(argv: list[str]) -> int:
    """Run the benchmark and print a table; return 0."""
    args = _parser().parse_args(argv)
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    check_output_options(args)
    words = list(args.words)
    recipe = Path(words.pop(0)) if words and "=" not in words[0] else None
    cfg = load_config(recipe, [*(() if recipe else DEFAULT_OVERRIDES), "data.kind=synthetic", *words])
    check_config(cfg)
    from moefold.launch.ranks import choose_device, spawn_ranks

    if cfg.run.device == "cuda" or choose_device(cfg.run.device, cfg.parallel.world_size, None) != "cpu":
        raise ConfigError(f"moefold bench ranks counts CPU time, and run.device={cfg.run.device!r}; set run.device=cpu")
    return spawn_ranks(partial(_measure, cfg, args), cfg.parallel.world_size, "cpu")


def _measure(cfg: Config, args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    import torch

    from moefold.bench.ranks import measure_ranks, time_shares
    from moefold.comm.groups import ParallelGroups
    from moefold.launch.ranks import init_distributed

    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type, cfg.faults.timeout_s) as device,
        WorkProgress("bench ranks", is_shown=rank_env.rank == 0) as progress,
    ):
        found = measure_ranks(cfg, ParallelGroups.create(check_config(cfg), device), args.steps, progress.report)
    if rank_env.rank == 0:
        shares = time_shares(found)
        report = {
            "kind": "ranks",
            "steps": args.steps,
            "tokens": cfg.train.tokens_per_step,
            "shares": shares,
            "step_s": max(rank.wall_s for rank in found),
            "per_rank": [rank.cpu_s for rank in found],
            "waiting_s": [rank.wall_s - rank.thread_s for rank in found],
        }
        write_report(args, report, _table(cfg.run, cfg.parallel, cfg.train, args, found, shares))
    return 0


def _table(
    run: RunConfig,
    p: ParallelConfig,
    train: TrainConfig,
    args: argparse.Namespace,
    ranks: "list[RankCpuTimes]",
    time_shares: dict[str, float],
) -> str:
    kinds = list(time_shares)
    lines = [
        f"{p.world_size} ranks, tp={p.tp} cp={p.cp} pp={p.pp} ep={p.ep} etp={p.etp}, "
        f"{train.tokens_per_step:,} tokens a step, {run.dtype}; CPU time in ms, medians of {args.steps} steps after 2",
        "rank  " + "".join(f"{kind:>18}" for kind in (*kinds, "waiting", "step by the clock")),
    ]
    for i, rank in enumerate(ranks):
        numbers = (*rank.cpu_s.values(), rank.wall_s - rank.thread_s, rank.wall_s)
        lines.append(f"{i:4}  " + "".join(f"{seconds * MS_PER_S:18.1f}" for seconds in numbers))
    lines.append(" all  " + "".join(f"{share:18.1%}" for share in time_shares.values()))
    outside = time_shares["communication"] + time_shares["Python"]
    lines.append(f"communication and Python: {outside:.1%} of the CPU time of a step")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold bench ranks",
        description="Train some steps on CPU ranks and break the CPU time of each rank down: matrix products, "
        "attention, other tensor work, communication (gloo's threads and the calls), Python and the rest. Without a "
        "recipe: the quickstart's model on eight ranks, tp=2 cp=2 pp=2 and ep=4. Data are random tokens.",
    )
    parser.add_argument("words", nargs="*", metavar="[RECIPE.toml] section.key=value", help="what to train")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each of two kinds (default 5)")
    add_output_options(parser)
    return parser
