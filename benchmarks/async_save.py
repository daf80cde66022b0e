"""What a checkpoint that is written beside training costs training: windows with and without a save, in one run.

    python benchmarks/async_save.py                                 the quickstart's 8 ranks, some minutes on a CPU
    python benchmarks/async_save.py parallel.world_size=1 parallel.tp=1 parallel.cp=1 parallel.pp=1 parallel.ep=1

Every window begins with a step that is not counted. In every second one a save begins after it, and steps are counted
until the save has ended on the first rank, and at most `--steps`; in the others as many steps without one. The time
that staging takes from training is counted to the first step. What other work does to the machine meets both alike.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from moefold.checkpoint.folder import Position
from moefold.checkpoint.saver import BackgroundSaver
from moefold.checkpoint.store import checkpoint_state
from moefold.config.checks import check_config
from moefold.config.load import load_config
from moefold.config.schema import Config
from moefold.data import open_dataset, prepare
from moefold.launch.place import Place
from moefold.launch.ranks import choose_device, joined, run_ranks
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import TrainingStep

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"


class _Run:
    """One rank's training, step by step."""

    def __init__(self, cfg: Config, place: Place, groups: ParallelGroups) -> None:
        model = parallelize(cfg, groups)
        data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        self._cfg, self._is_first = cfg, place.rank == 0
        self._training = TrainingStep(model, cfg)
        self._batches = BatchLoader(data.train, cfg, groups, model.positions)
        group = groups.beside_training().handle
        self._saver = BackgroundSaver(cfg, group, is_on_gpu=groups.device.type == "cuda")
        self._step = 0

    def step(self) -> float:
        """Train one step; its time in seconds."""
        started_s = time.perf_counter()
        self._training.run(self._batches.batch(self._step * self._cfg.train.global_batch_size), self._step + 1)
        self._step += 1
        return time.perf_counter() - started_s

    def window(self, steps: int, *, saves: bool) -> tuple[list[float], float]:
        """Times of the steps of a window, in seconds, and the time that staging took."""
        self.step()
        staging_s = self._begin_save() if saves else 0.0
        times = [self.step() + staging_s]
        while len(times) < steps and (not saves or self._anyone_saves()):
            times.append(self.step())
        self._saver.settle(600.0)
        self._saver.check()
        return times, staging_s

    def _begin_save(self) -> float:
        training = self._training
        state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
        return self._saver.save(state, Position(step=self._step, samples=0, tokens=0))

    def _anyone_saves(self) -> bool:
        found = [self._saver.is_under_way]
        dist.broadcast_object_list(found, src=0)
        return found[0]


def _measure(cfg: Config, pairs: int, steps: int, place: Place, device_type: str) -> int:
    with joined(place, device_type) as device:
        run = _Run(cfg, place, ParallelGroups.create(check_config(cfg), device))
        # The first save makes the copies in host memory that later ones reuse.
        run.window(steps, saves=True)
        alone, beside, staging, counts = [], [], [], []
        for pair in range(pairs):
            # Which one comes first takes turns, so that a drift of the machine meets both.
            for saves in (True, False) if pair % 2 else (False, True):
                times, staging_s = run.window(
                    statistics.median_high(counts) if counts and not saves else steps, saves=saves
                )
                (beside if saves else alone).append(times)
                if saves:
                    staging.append(staging_s)
                    counts.append(len(times))
        if place.rank == 0:
            _print(alone, beside, staging)
    return 0


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="windows of each kind")
    parser.add_argument("--steps", type=int, default=5, help="most steps of a window")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    cfg = load_config(args.recipe, args.overrides)
    with tempfile.TemporaryDirectory() as folder:
        cfg = replace(cfg, run=replace(cfg.run, dir=folder), checkpoint=replace(cfg.checkpoint, every=1, keep=1))
        check_config(cfg)
        prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        device_type = choose_device(cfg.run.device, cfg.parallel.world_size, None)
        run_ranks(partial(_measure, cfg, args.pairs, args.steps), cfg.parallel.world_size, device_type, None)


if __name__ == "__main__":
    main()
