"""`moefold lengths`: show a distribution of document lengths, and how evenly placements share its attention."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from moefold.cli.command_parser import CommandParser, add_part_option
from moefold.cli.plan_documents import describe_documents
from moefold.config.bounds import max_integer
from moefold.config.groups.context import ContextPart
from moefold.config.limits import check_at_most
from moefold.config.part import make_part
from moefold.config.suggestions import nearest_multiples
from moefold.errors import ConfigError
from moefold.planner.lengths.balance import MIN_ROUNDS, DocumentLoads, num_planned_rounds
from moefold.planner.lengths.distribution import histogram_names
from moefold.planner.lengths.document_source import open_document_samples
from moefold.planner.lengths.strategy import describe_strategy, strategy_as_dict
from moefold.terminal import print_escaped

MAX_RANKS = 4096
"""Most ranks of dp x cp whose rounds are planned: a round takes about 0.1 ms for each."""
MAX_SAMPLES = MIN_ROUNDS * MAX_RANKS
"""Most samples of all rounds together: one for each of `MAX_RANKS` data-parallel ranks in each round."""

EPILOG = """example:
  moefold lengths wikipedia wlb prolong magi --seq-len 131072 --cp 8 --dp 4 --tolerance 0.02
"""


Row = tuple[ContextPart, dict[str, Any]]
"""A strategy, and the numbers of the rounds under it."""


def run(argv: list[str]) -> int:
    """Print the table; return 0.

    Raises:
        ConfigError: a name is unknown, or an option is out of range.
    """
    args = _parser().parse_args(argv)
    _check(args)
    rows = [row for name in args.names for row in _rows(name, args)]
    if args.json:
        print(json.dumps([numbers for _, numbers in rows]))
        return 0
    for name in args.names:
        loads = DocumentLoads(open_document_samples(name, args.seq_len), args.seq_len)
        print_escaped(describe_documents(loads))
    _print(rows, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("seq-len", "cp", "dp", "micro-batch-size", "block"):
        if (value := getattr(args, name.replace("-", "_"))) < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    check_at_most("--seq-len", args.seq_len, max_integer("train", "seq_len"))
    check_at_most("--cp times --dp", args.cp * args.dp, MAX_RANKS)
    check_at_most("--micro-batch-size", args.micro_batch_size, MAX_RANKS)
    rounds = num_planned_rounds(args.cp * args.dp)
    if args.dp * args.micro_batch_size * rounds > MAX_SAMPLES:
        most = MAX_SAMPLES // (args.dp * rounds)
        raise ConfigError(
            f"--micro-batch-size {args.micro_batch_size} gives {args.dp * args.micro_batch_size * rounds:,} samples in "
            f"{rounds} rounds of --dp {args.dp}, and at most {MAX_SAMPLES:,} are planned; choose --micro-batch-size "
            f"{most} or less, or a smaller --dp"
        )
    if args.seq_len % (2 * args.cp):
        raise ConfigError(
            f"--seq-len {args.seq_len} must be a multiple of 2*cp={2 * args.cp}; choose "
            f"{nearest_multiples(args.seq_len, 2 * args.cp)}, or another --cp"
        )
    if not 0 <= args.tolerance <= 1:
        raise ConfigError(f"--tolerance {args.tolerance:g} must lie between 0 and 1: 0.1 keeps 10 % above the mean")


def _rows(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the attention of the rounds of some documents under each strategy."""
    samples = open_document_samples(name, args.seq_len)
    strategies = [make_part(ContextPart.group, "ring"), make_part(ContextPart.group, "ulysses")]
    strategies += make_part(ContextPart.group, "planned", tolerance=args.tolerance, block=args.block).variants()
    for strategy in strategies:
        loads = DocumentLoads(samples, args.seq_len, strategy)
        rounds = loads.rounds(args.cp, args.dp, args.micro_batch_size)
        numbers = {
            "lengths": name,
            "effective_length": loads.effective_length,
            **strategy_as_dict(strategy),
            "max_over_mean": rounds.max_over_mean,
            # Ring attention passes the keys and values of all other ranks of a sample through each rank.
            "received_keys": rounds.received_keys if strategy.is_planned else float(args.cp - 1),
            "moved_queries": rounds.moved_queries,
        }
        yield strategy, numbers


def _print(rows: list[Row], args: argparse.Namespace) -> None:
    print_escaped(
        f"\n{args.cp * args.dp} ranks, cp={args.cp} dp={args.dp}, samples of {args.seq_len:,} tokens, tolerance "
        f"{args.tolerance:g}; busiest: attention work of the busiest rank of a round over the mean"
    )
    print_escaped(f"{'lengths':12} {'attention':45} {'busiest':>8} {'keys/token':>11} {'queries moved':>14}")
    for strategy, row in rows:
        keys = f"{row['received_keys']:11.2f}" if not strategy.shards_heads else f"{'-':>11}"
        print_escaped(
            f"{row['lengths']:12} {describe_strategy(strategy):45} {row['max_over_mean']:8.2f} {keys} "
            f"{row['moved_queries']:14.1%}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold lengths",
        description="Show how evenly the ranks of a round share the attention of documents of given lengths: visible "
        "pairs of the busiest rank over the mean, for each kind of context, placement and choice of hosts. The rounds "
        "are drawn with a fixed seed and planned by the code of the runtime.",
        epilog=EPILOG,
    )
    names = ", ".join(histogram_names())
    parser.add_argument(
        "names", nargs="+", metavar="NAME|FILE|RUN", help=f"lengths of the documents: {names}, a file, or a run's data"
    )
    parser.option("--seq-len", 131072, "S", "tokens per sample (default 131072)")
    parser.option("--cp", 8, None, "ranks of a sample (default 8)")
    parser.option("--dp", 4, None, "data-parallel ranks (default 4)")
    parser.option("--micro-batch-size", 1, "B", "samples of a data-parallel rank in a round (default 1)")
    parser.option("--tolerance", 0.1, "X", "tolerance of parallel.context=planned (default 0.1)")
    parser.option("--block", 128, "N", "block of parallel.context=planned (default 128)")
    parser.flag("--json", "print the numbers as one JSON array")
    add_part_option(parser)
    return parser
