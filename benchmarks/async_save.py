"""What a checkpoint that is written beside training costs training: windows with and without a save, in one run.

    python benchmarks/async_save.py                                 the quickstart's 8 ranks, some minutes on a CPU
    python benchmarks/async_save.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1

Every window begins with a step that is not counted. In every second one a save begins after it, and steps are counted
until the save has ended on the first rank, and at most `--steps`; in the others as many steps without one. The time
that staging takes from training is counted to the first step. What other work does to the machine meets both alike.
"""

import argparse
import statistics

import torch.distributed as dist
from rank_run import RankRun, parser, run_recipe

from moefold.checkpoint.checkpoint_dir import TrainState
from moefold.checkpoint.save_load import checkpoint_state
from moefold.checkpoint.saver import BackgroundSaver
from moefold.config.schema import Config


class _Saving:
    """One rank's training, with and without saves."""

    def __init__(self, cfg: Config, run: RankRun) -> None:
        self._run = run
        group = run.groups.create_background_group().handle
        self._saver = BackgroundSaver(cfg, group, is_on_gpu=run.groups.device.type == "cuda")

    def window(self, steps: int, *, saves: bool) -> tuple[list[float], float]:
        """Times of the steps of a window, in seconds, and the time that staging took."""
        self._run.step()
        staging_s = self._begin_save() if saves else 0.0
        times = [self._run.step()[0] + staging_s]
        while len(times) < steps and (not saves or self._anyone_saves()):
            times.append(self._run.step()[0])
        self._saver.drain_with_timeout(600.0)
        self._saver.check()
        return times, staging_s

    def _begin_save(self) -> float:
        training = self._run.training
        state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
        return self._saver.save(state, TrainState(step=self._run.num_steps, samples=0, tokens=0))

    def _anyone_saves(self) -> bool:
        found = [self._saver.is_saving]
        dist.broadcast_object_list(found, src=0)
        return found[0]


def _measure(cfg: Config, run: RankRun, args: argparse.Namespace) -> None:
    saving = _Saving(cfg, run)
    # The first save makes the copies in host memory that later ones reuse.
    saving.window(args.steps, saves=True)
    alone, beside, staging, counts = [], [], [], []
    for pair in range(args.pairs):
        # Which one comes first takes turns, so that a drift of the machine meets both.
        for saves in (True, False) if pair % 2 else (False, True):
            length = statistics.median_high(counts) if counts and not saves else args.steps
            times, staging_s = saving.window(length, saves=saves)
            (beside if saves else alone).append(times)
            if saves:
                staging.append(staging_s)
                counts.append(len(times))
    if run.is_first:
        _print(alone, beside, staging)


def _print(alone: list[list[float]], beside: list[list[float]], staging: list[float]) -> None:
    without_s = statistics.median(t for times in alone for t in times)
    with_s = statistics.median(t for times in beside for t in times)
    first_s = statistics.median(times[0] for times in beside)
    spread = statistics.quantiles([t for times in alone for t in times], n=4)
    print(f"step without a save: {without_s * 1e3:.0f} ms (quartiles {spread[0] * 1e3:.0f} to {spread[2] * 1e3:.0f})")
    print(f"step during a save:  {with_s * 1e3:.0f} ms, {100 * (with_s / without_s - 1):+.1f} %")
    print(f"  the first of each, staging included: {first_s * 1e3:.0f} ms, {100 * (first_s / without_s - 1):+.1f} %")
    print(f"  staging: {statistics.median(staging) * 1e3:.1f} ms; steps per save: {[len(times) for times in beside]}")


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--pairs", type=int, default=15, help="windows of each kind")
    words.add_argument("--steps", type=int, default=5, help="most steps of a window")
    run_recipe(_measure, words.parse_args(), ["checkpoint.every=1", "checkpoint.keep=1"])


if __name__ == "__main__":
    main()
