"""Time our training step against plain torch, transformers and installed frameworks, alternating in one process.

    python -m benchmarks.race.step [OPTIONS]    (`make bench`)

Has the options of `moefold bench` and prints the same table, and below it the time of the parts of our step.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.program import add_picture, check_report_options, run_program, write_report
from benchmarks.race.other_frameworks import PEERS, PeerUnavailableError, num_weight_copies
from benchmarks.race.reference_steps import reference_steps_of
from benchmarks.race.torch_baseline import ExpertsImplementation, baseline_unsupported_reason
from benchmarks.step_parts import PartsTimer, PartTime, part_lines
from moefold.bench.our_step import StepFunction, our_step
from moefold.bench.shape import BenchPart, BenchRouting, BenchShape, bench_config, max_fitting_experts
from moefold.bench.step_bench import StepReport, measure_step
from moefold.bench.timing import CLOCKS, free_memory_bytes, synchronized, time_interleaved
from moefold.cli.bench import checked_shape, device_type_from_args, format_report, step_parser
from moefold.config.schema import Config
from moefold.errors import ConfigError, install_command
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Experts implementations of transformers for training. The faster one is compared.

batched_mm is left out: it copies the experts' weights for each token (23 GiB at the small shape) and is slower.
"""
TRANSFORMERS_VARIANTS = tuple(f"transformers, {kind}" for kind in EXPERTS_IMPLEMENTATIONS)


@dataclass(frozen=True)
class Race:
    """Results of our step and of its references."""

    report: StepReport
    absent: list[str]
    """Implementations that are left out, each with the reason."""
    ratio_to_transformers: float
    """Median over the rounds of the time of transformers' faster implementation over ours."""
    ratio_to_plain: float | None
    ratios_to_peers: dict[str, float]
    pieces: list[PartTime]
    """Parts of our step."""
    experts_of_bare_loop: float
    """Speed of our experts relative to the bare loop of their GEMMs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the results as a dictionary for JSON."""
        pieces = [asdict(piece) | {"gap": piece.gap if piece.floor_s else None} for piece in self.pieces]
        fields = {name: value for name, value in vars(self).items() if name != "report"}
        return {**self.report.as_dict(), "kind": "comparison", **fields, "pieces": pieces}

    def lines(self) -> list[str]:
        """Return the text below the table of steps: absent frameworks, the ratios, and the parts of our step."""
        lines = [f"  {reason}" for reason in self.absent]
        lines.append(f"ratio to transformers: {self.ratio_to_transformers:.3f}")
        if self.ratio_to_plain is not None:
            lines.append(f"ratio to plain torch: {self.ratio_to_plain:.3f}")
        lines += [f"ratio to {name}: {ratio:.3f}" for name, ratio in self.ratios_to_peers.items()]
        return [*lines, "", *part_lines(self.pieces, self.report.rows[0].median_s, self.experts_of_bare_loop)]


def race_steps(
    cfg: Config,
    part: BenchPart,
    routing: BenchRouting,
    device: torch.device,
    rounds: int,
    clock: str = "wall",
    on_progress: ProgressCallback = ignore_progress,
) -> Race:
    """Time all implementations in the same rounds. A whole model needs a process group of size 1.

    The slower of transformers' experts implementations is dropped after a short comparison of the two.

    Raises:
        ConfigError: transformers is missing, or does not have the model.
    """
    if find_spec("transformers") is None:
        raise ConfigError(f"the race needs transformers, which is missing: {install_command('hf')}")
    on_progress("building the models")
    ours = our_step(cfg, part, device, routing)
    run = ours.build()
    references = reference_steps_of(ours)
    unsupported = baseline_unsupported_reason(cfg.model, with_attention=part != "layer")
    kinds: tuple[ExpertsImplementation, ...] = ("loop", "grouped_mm") if device.type == "cuda" else ("loop",)
    plain = {f"plain torch, {kind}": references.build_torch_baseline(kind) for kind in kinds if not unsupported}
    absent = [f"plain torch: {unsupported}"] if unsupported else []
    variants = {f"transformers, {kind}": references.build_transformers(kind) for kind in EXPERTS_IMPLEMENTATIONS}
    peers: dict[str, StepFunction] = {}
    for peer in PEERS:
        try:
            peers[peer.title] = references.build_peer(peer)
        except PeerUnavailableError as reason:
            absent.append(f"{peer.name}: {reason}")
    on_progress("choosing the faster of transformers' implementations")
    quick = time_interleaved(
        {name: synchronized(step, device) for name, step in variants.items()},
        warmup=1,
        rounds=2,
        clock=CLOCKS[clock],
    )
    fastest = min(variants, key=lambda name: min(quick[name]))
    others = {**plain, fastest: variants[fastest], **peers}
    parts = PartsTimer(ours, run, clock)
    report = measure_step(ours, run, rounds, clock, on_progress, others, parts.kernels)
    times_s = {row.name: row.rounds_s for row in report.rows}
    medians = {row.name: row.median_s for row in report.rows}
    our_times_s = report.rows[0].rounds_s
    best_plain = min(plain, key=lambda name: medians[name]) if plain else None
    return Race(
        report=report,
        absent=absent,
        ratio_to_transformers=median_ratio(our_times_s, times_s[fastest]),
        ratio_to_plain=None if best_plain is None else median_ratio(our_times_s, times_s[best_plain]),
        ratios_to_peers={name: median_ratio(our_times_s, times_s[name]) for name in peers},
        pieces=parts.part_times(report),
        experts_of_bare_loop=parts.experts_of_bare_loop(report),
    )


def median_ratio(fast_s: list[float], slow_s: list[float]) -> float:
    """Return the median over the rounds of slow time over fast time."""
    return statistics.median(slow / fast for fast, slow in zip(fast_s, slow_s, strict=True))


def _measure(shape: BenchShape, args: argparse.Namespace, rank_env: RankEnv, device_name: str) -> int:
    torch.set_num_threads(args.threads)
    with init_distributed(rank_env, device_name) as device, WorkProgress("race") as progress:
        size = 2 if args.dtype == "bfloat16" else 4
        copies = num_weight_copies(bench_config(shape, dtype=args.dtype), shape.part, device)
        experts = args.experts or max_fitting_experts(shape, size, free_memory_bytes(device), copies)
        cfg = bench_config(shape, dtype=args.dtype, tokens=args.tokens, experts=experts, device=device_name)
        race = race_steps(cfg, shape.part, args.routing, device, args.steps, args.clock, progress.report)
    write_report(args, race.as_dict() | {"shape": shape.name}, format_report(shape, race.report, race.lines()))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the race, and return 0; 2 for wrong options."""
    parser = step_parser(
        "python -m benchmarks.race.step",
        "Time our training step and, in turn in the same process, plain torch and transformers' fastest experts "
        "implementation, with the parts of our step and the FLOP/s and bandwidth that the machine reaches in the same "
        "rounds. With moefold[peers] the layers of megatron-core and torchtitan join the shapes that end in -layer.",
    )
    add_picture(parser)
    return run_program(_run, parser, argv)


def _run(args: argparse.Namespace) -> int:
    check_report_options(args)
    shape = checked_shape(args)
    return spawn_ranks(partial(_measure, shape, args), 1, device_type_from_args(args))


if __name__ == "__main__":
    sys.exit(main())
