"""Measure true and false positives of straggler detection, with and without other load and a slow rank.

    python benchmarks/straggler_detection.py                         the quickstart's 8 ranks, a few minutes on a CPU
    python benchmarks/straggler_detection.py --save times.npz        also save the times of each rank in each step
    python benchmarks/straggler_detection.py --load times.npz        evaluate saved times without training

One run has a series of phases: without other load or with processes that each use a core, and with equal ranks or with
one rank whose compute time is longer by a factor, as on a machine with a lower clock rate. Each phase is evaluated
separately by `metrics.rank_times.Stragglers`, with the recipe's faults.straggler_factor.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rank_trainer import RankTrainer, build_parser, run_recipe

from moefold.config.schema import Config
from moefold.metrics.rank_times import COMPUTE, Stragglers
from moefold.recipe import load_config
from moefold.topology.layout import fold_mapping

SLOW_RANK = 5
WARM_UP = 3


@contextmanager
def _cpu_load(count: int) -> Iterator[None]:
    """Run `count` processes that each keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _measure_phase(trainer: RankTrainer, steps: int, factor: float) -> np.ndarray:
    """Return the times of all ranks in each step, [steps, ranks, 3]. SLOW_RANK computes `factor` times as long."""
    rank = trainer.groups.rank
    delay_s = 0.0
    times = []
    for step in range(WARM_UP + steps):
        _, result = trainer.step(delay_s=delay_s)
        compute_s = float(result.rank_times[rank, COMPUTE]) - delay_s
        delay_s = (factor - 1) * compute_s if rank == SLOW_RANK else 0.0
        if step >= WARM_UP:
            times.append(result.rank_times)
    return np.stack(times)


def _measure(cfg: Config, trainer: RankTrainer, args: argparse.Namespace) -> None:
    phases = {}
    for load in args.busy_cores:
        for factor in args.factors:
            with _cpu_load(load if trainer.is_first else 0):
                phases[f"{load} {factor:g}"] = _measure_phase(trainer, args.steps, factor)
    if trainer.is_first:
        if args.save:
            np.savez_compressed(args.save, **phases)
        _evaluate(phases, cfg)


def _evaluate(phases: dict[str, np.ndarray], cfg: Config) -> None:
    parallel = cfg.parallel
    layout = fold_mapping(parallel)
    stages = layout.attention.groups("dp", "cp", "tp")
    print(f"faults.straggler_factor={cfg.faults.straggler_factor:g}; rank {SLOW_RANK} is slow by a factor")
    print("   busy  factor  steps  detected at steps   false positives  compute / median, middle 90 % of healthy ranks")
    for name, times in phases.items():
        load, factor = name.split()
        stragglers = Stragglers(cfg.faults.straggler_factor, stages, ["host"] * layout.world_size)
        detected = [
            (step, record["rank"])
            for step, step_times in enumerate(times, 1)
            for record in stragglers.update(step_times)
        ]
        is_slow = float(factor) > 1
        true_positives = [str(step) for step, rank in detected if is_slow and rank == SLOW_RANK]
        false_positives = len(detected) - len(true_positives)
        low, high = _spread(times, [list(stage) for stage in stages], SLOW_RANK if is_slow else -1)
        row = f"{load:>7}  {factor:>6}  {len(times):>5}  {', '.join(true_positives) or '-':<18}  {false_positives:>15}"
        print(f"{row}  {low:.2f} to {high:.2f}")


def _spread(times: np.ndarray, stages: list[list[int]], slow_rank: int) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of compute time over the stage's median, without the slow rank."""
    ratios = [
        times[:, rank, COMPUTE] / np.median(times[:, stage, COMPUTE], axis=1)
        for stage in stages
        for rank in stage
        if rank != slow_rank
    ]
    low, high = np.quantile(ratios, (0.05, 0.95)).tolist()
    return low, high


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of a phase (default 100)")
    parser.add_argument(
        "--busy-cores", type=int, nargs="+", default=[0, 2], help="processes that each keep a core busy"
    )
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="compute times of the slow rank, 1: not slow"
    )
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="save the times")
    parser.add_argument("--load", type=Path, metavar="FILE.npz", help="evaluate saved times, do not train")
    args = parser.parse_args()
    if args.load:
        with np.load(args.load) as phases:
            _evaluate(dict(phases), load_config(args.recipe, args.overrides))
    else:
        run_recipe(_measure, args)


if __name__ == "__main__":
    main()
