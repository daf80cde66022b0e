"""Measure how much an asynchronous checkpoint save slows training: steps with and without a save, in one run.

    python benchmarks/async_save.py                                 the quickstart's 8 ranks, a few minutes on a CPU
    python benchmarks/async_save.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1

Every window begins with an uncounted step. In every second window a save follows it, and steps are counted until the
save has ended on the first rank, at most `--steps`. The other windows have as many steps without a save. The time that
training is blocked by staging is added to the first step. Windows of both kinds alternate, so other load on the machine
affects both equally.
"""

import argparse
import statistics

import torch.distributed as dist
from rank_trainer import RankTrainer, build_parser, run_recipe

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.saver import BackgroundSaver
from moefold.config.schema import Config


class _SavingTrainer:
    """Training of one rank, with and without concurrent saves."""

    def __init__(self, cfg: Config, trainer: RankTrainer) -> None:
        self._trainer = trainer
        group = trainer.groups.create_background_group().handle
        self._saver = BackgroundSaver(cfg, group, is_on_gpu=trainer.groups.device.type == "cuda")

    def window(self, steps: int, *, saves: bool) -> tuple[list[float], float]:
        """Return the step times of a window and the time of staging, in seconds."""
        self._trainer.step()
        staging_s = self._begin_save() if saves else 0.0
        times = [self._trainer.step()[0] + staging_s]
        while len(times) < steps and (not saves or self._first_rank_is_saving()):
            times.append(self._trainer.step()[0])
        self._saver.drain_with_timeout(600.0)
        self._saver.check()
        return times, staging_s

    def _begin_save(self) -> float:
        training = self._trainer.training
        state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
        return self._saver.save(state, TrainState(states=counted(step=self._trainer.num_steps, samples=0, tokens=0)))

    def _first_rank_is_saving(self) -> bool:
        is_saving = [self._saver._pending_save is not None and not self._saver._pending_save.done()]
        dist.broadcast_object_list(is_saving, src=0)
        return is_saving[0]


def _measure(cfg: Config, trainer: RankTrainer, args: argparse.Namespace) -> None:
    saving_trainer = _SavingTrainer(cfg, trainer)
    # Warm up: the first save allocates the host buffers that later saves reuse.
    saving_trainer.window(args.steps, saves=True)
    without_save: list[list[float]] = []
    with_save: list[list[float]] = []
    staging: list[float] = []
    counts: list[int] = []
    for pair in range(args.pairs):
        # Alternate the first kind, so that drift of the machine affects both.
        for saves in (True, False) if pair % 2 else (False, True):
            length = statistics.median_high(counts) if counts and not saves else args.steps
            times, staging_s = saving_trainer.window(length, saves=saves)
            (with_save if saves else without_save).append(times)
            if saves:
                staging.append(staging_s)
                counts.append(len(times))
    if trainer.is_first:
        _print(without_save, with_save, staging)


def _print(without_save: list[list[float]], with_save: list[list[float]], staging: list[float]) -> None:
    without_s = statistics.median(t for times in without_save for t in times)
    with_s = statistics.median(t for times in with_save for t in times)
    first_s = statistics.median(times[0] for times in with_save)
    spread = statistics.quantiles([t for times in without_save for t in times], n=4)
    print(f"step without a save: {without_s * 1e3:.0f} ms (quartiles {spread[0] * 1e3:.0f} to {spread[2] * 1e3:.0f})")
    print(f"step during a save:  {with_s * 1e3:.0f} ms, {100 * (with_s / without_s - 1):+.1f} %")
    print(
        f"  first step of each save, staging included: {first_s * 1e3:.0f} ms, {100 * (first_s / without_s - 1):+.1f} %"
    )
    print(
        f"  staging: {statistics.median(staging) * 1e3:.1f} ms; steps per save: {[len(times) for times in with_save]}"
    )


def main() -> None:
    """Measure and print."""
    parser = build_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="number of windows of each kind")
    parser.add_argument("--steps", type=int, default=5, help="maximum number of steps of a window")
    run_recipe(_measure, parser.parse_args(), ["checkpoint.every=1", "checkpoint.keep=1"])


if __name__ == "__main__":
    main()
