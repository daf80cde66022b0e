"""How often a slow rank is named, and how often one that is not: healthy and burdened machines, with and without one.

    python benchmarks/stragglers.py                         the quickstart's 8 ranks; minutes on a CPU
    python benchmarks/stragglers.py --save times.npz        and keeps what each rank spent in each step
    python benchmarks/stragglers.py --load times.npz        judges that again, trains nothing

Stretches of steps follow each other in one run: nothing else, or processes that burn a core each beside it, with all
ranks alike or with one whose own work takes longer by a factor, as on a machine that runs at a lower clock. Each
stretch is judged by itself by `metrics.rank_times.Stragglers`, with the recipe's faults.straggler_factor.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rank_run import RankRun, parser, run_recipe

from moefold.config.schema import Config
from moefold.metrics.rank_times import COMPUTE, Stragglers
from moefold.recipe import load_config
from moefold.topology.layout import fold

SLOW_RANK = 5
WARM_UP = 3


@contextmanager
def _burden(count: int) -> Iterator[None]:
    """Inside, so many processes keep a core busy each; on one rank."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _stretch(run: RankRun, steps: int, factor: float) -> np.ndarray:
    """Times of all ranks in each step, [steps, ranks, 3]; the own work of one takes `factor` times as long."""
    rank = run.groups.rank
    delay_s, times = 0.0, []
    for step in range(WARM_UP + steps):
        _, result = run.step(delay_s=delay_s)
        own_s = float(result.rank_times[rank, COMPUTE]) - delay_s
        delay_s = (factor - 1) * own_s if rank == SLOW_RANK else 0.0
        if step >= WARM_UP:
            times.append(result.rank_times)
    return np.stack(times)


def _measure(cfg: Config, run: RankRun, args: argparse.Namespace) -> None:
    found = {}
    for burners in args.burners:
        for factor in args.factors:
            with _burden(burners if run.is_first else 0):
                found[f"{burners} {factor:g}"] = _stretch(run, args.steps, factor)
    if run.is_first:
        if args.save:
            np.savez_compressed(args.save, **found)
        _judge(found, cfg)


def _judge(found: dict[str, np.ndarray], cfg: Config) -> None:
    parallel = cfg.parallel
    layout = fold(
        world_size=parallel.world_size,
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
    )
    stages = layout.attention.groups("dp", "cp", "tp")
    print(f"faults.straggler_factor={cfg.faults.straggler_factor:g}; rank {SLOW_RANK} is slow by a factor")
    print("burners  factor  steps  named after steps   wrongly named    own time / median: middle 90 % of the healthy")
    for name, times in found.items():
        burners, factor = name.split()
        watch = Stragglers(cfg.faults.straggler_factor, stages, ["host"] * layout.world_size)
        named = [(step, record["rank"]) for step, one in enumerate(times, 1) for record in watch.update(one)]
        is_slow = float(factor) > 1
        right = [str(step) for step, rank in named if is_slow and rank == SLOW_RANK]
        wrong = len(named) - len(right)
        low, high = _spread(times, [list(stage) for stage in stages], SLOW_RANK if is_slow else -1)
        row = f"{burners:>7}  {factor:>6}  {len(times):>5}  {', '.join(right) or '-':<18}  {wrong:>6}"
        print(f"{row}           {low:.2f} to {high:.2f}")


def _spread(times: np.ndarray, stages: list[list[int]], slow: int) -> tuple[float, float]:
    """How far ranks that do the same lie apart in a step."""
    ratios = [
        times[:, rank, COMPUTE] / np.median(times[:, stage, COMPUTE], axis=1)
        for stage in stages
        for rank in stage
        if rank != slow
    ]
    low, high = np.quantile(ratios, (0.05, 0.95)).tolist()
    return low, high


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--steps", type=int, default=100, help="of a stretch")
    words.add_argument("--burners", type=int, nargs="+", default=[0, 2], help="processes that burn a core each")
    words.add_argument("--factors", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    words.add_argument("--save", type=Path)
    words.add_argument("--load", type=Path)
    args = words.parse_args()
    if args.load:
        with np.load(args.load) as found:
            _judge(dict(found), load_config(args.recipe, args.overrides))
    else:
        run_recipe(_measure, args)


if __name__ == "__main__":
    main()
