"""`moefold bench documents`: time context parallelism on packed documents, by kind of context."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from moefold.cli.bench_output import add_output_options, check_output_options, write_report
from moefold.cli.command_parser import CommandParser
from moefold.config.bounds import max_integer
from moefold.config.limits import MAX_MICRO_BATCHES, check_at_most
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.planner.lengths.distribution import histogram_names, load_distribution
from moefold.planner.lengths.samples import SampleLengths, StreamedSamples, effective_length
from moefold.progress import WorkProgress

if TYPE_CHECKING:
    from moefold.bench.documents import MethodTime

MAX_RANKS = 64
"""Most ranks: each is a process on this machine."""
MAX_SEED = 2**32 - 1
"""Largest seed that numpy takes."""
MS_PER_S = 1e3
MIB = 2**20


def run(argv: list[str]) -> int:
    """Run the benchmark on CPU ranks of this machine and print its table; return 0."""
    args = _parser().parse_args(argv)
    for name in ("steps", "seq-len", "cp", "dp", "micro-batches"):
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be at least 0")
    check_at_most("--seed", args.seed, MAX_SEED)
    check_at_most("--seq-len", args.seq_len, max_integer("train", "seq_len"))
    check_at_most("--cp times --dp", args.cp * args.dp, MAX_RANKS)
    check_at_most("--micro-batches", args.micro_batches, MAX_MICRO_BATCHES)
    if args.seq_len % (2 * args.cp):
        raise ConfigError(
            f"--seq-len {args.seq_len} must be a multiple of 2*cp={2 * args.cp}: ring attention gives each rank two "
            "chunks of a sample"
        )
    if args.cp not in (2, 4):
        raise ConfigError(f"--cp {args.cp} must be 2 or 4, which divides the 4 heads of the model")
    check_output_options(args)
    samples = StreamedSamples(load_distribution(args.lengths)).draw(
        args.seq_len, args.dp * args.micro_batches, args.seed
    )
    from moefold.launch.ranks import spawn_ranks

    return spawn_ranks(partial(_measure, args, samples), args.cp * args.dp, "cpu")


def _measure(args: argparse.Namespace, samples: list[SampleLengths], rank_env: RankEnv, device_type: str) -> int:
    import torch

    from moefold.bench.documents import CONTEXT_METHODS, measure_contexts
    from moefold.bench.timing import describe_device
    from moefold.launch.ranks import init_distributed
    from moefold.topology.layout import fold

    torch.set_num_threads(1)
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("bench documents", is_shown=rank_env.rank == 0) as progress,
    ):
        ranks = args.cp * args.dp
        layout = fold(world_size=ranks, cp=args.cp, ep=ranks)
        found = measure_contexts(samples, layout, tuple(CONTEXT_METHODS), args.steps, device, progress.report)
        machine = describe_device(device)
    if rank_env.rank == 0:
        report = {
            "kind": "documents",
            "lengths": args.lengths,
            "seq_len": args.seq_len,
            "cp": args.cp,
            "dp": args.dp,
            "micro_batches": args.micro_batches,
            "rounds": args.steps,
            "effective_length": effective_length(samples),
            "machine": machine,
            "methods": [asdict(row) for row in found],
        }
        write_report(args, report, _table(args, samples, machine, found))
    return 0


def _table(args: argparse.Namespace, samples: list[SampleLengths], machine: str, rows: "list[MethodTime]") -> str:
    documents = sum(map(len, samples))
    ring = rows[0]
    lines = [
        f"{args.cp * args.dp} ranks, cp={args.cp} dp={args.dp} ep={args.cp * args.dp}, {len(samples)} samples of "
        f"{args.seq_len:,} tokens with {documents} documents of {args.lengths} (effective length "
        f"{effective_length(samples):,.0f})",
        f"{machine} per rank; medians of {args.steps} rounds in turn after 1, until the last rank has finished",
        "attention: core attention of one layer, forward and backward, with its communication; busiest CPU: CPU time "
        "in it of the busiest rank, which is what ranks with cores of their own wait for",
        "",
        f"{'':18}  {'attention ms':>12}  {'of ring':>8}  {'busiest CPU ms':>14}  {'of ring':>8}  {'of mean':>8}  "
        f"{'step ms':>9}  {'of ring':>8}  {'sent MiB':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row.method:18}  {row.attention_s * MS_PER_S:12.1f}  {row.attention_s / ring.attention_s:8.2f}  "
            f"{row.busiest_cpu_s * MS_PER_S:14.1f}  {row.busiest_cpu_s / ring.busiest_cpu_s:8.2f}  "
            f"{row.busiest_cpu_s / row.mean_cpu_s:8.2f}  "
            f"{row.step_s * MS_PER_S:9.1f}  {row.step_s / ring.step_s:8.2f}  {row.sent_bytes / MIB:9.2f}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="moefold bench documents",
        description="Train a small MoE model on CPU ranks with samples of packed documents, and compare the kinds of "
        "context parallelism: time of the core attention, of the whole step, and bytes sent. Experts are folded over "
        "all ranks, so every layer waits for the rank with the most attention work.",
    )
    add = parser.add_argument
    add(
        "--lengths",
        default="wikipedia",
        metavar="NAME|FILE",
        help=f"lengths of the documents: {', '.join(histogram_names())}, or a file (default wikipedia)",
    )
    add("--seq-len", type=int, default=4096, metavar="S", help="tokens per sample (default 4096)")
    add("--cp", type=int, default=4, help="ranks of a sample (default 4)")
    add("--dp", type=int, default=2, help="data-parallel ranks, of one sample at a time (default 2)")
    add("--micro-batches", type=int, default=2, metavar="N", help="micro-batches of a step (default 2)")
    add("--seed", type=int, default=0, help="seed of the lengths (default 0)")
    add("--steps", type=int, default=5, help="measured rounds (default 5)")
    add_output_options(parser)
    return parser
