"""One rank's training, step by step, for the benchmarks that measure what goes on beside it."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data import open_dataset, prepare
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import choose_device, init_distributed, run_ranks
from moefold.launch.watchdog import Watchdog
from moefold.parallel.parallelize import parallelize
from moefold.recipe import load_config
from moefold.train.batch import BatchSharder
from moefold.train.train_step import StepResult, TrainingStep
from moefold.validate.config import check_config

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"

RankMain = Callable[[Config, "RankRun", argparse.Namespace], None]


class RankRun:
    """The part of this rank: model, optimizer and data."""

    def __init__(self, cfg: Config, place: RankEnv, groups: ParallelGroups) -> None:
        model = parallelize(cfg, groups)
        data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        self.is_first = place.rank == 0
        self.groups = groups
        self.training = TrainingStep(model, cfg)
        self.num_steps = 0
        self._batches = BatchSharder(data.train, cfg, groups, model.positions)
        self._batch_size = cfg.train.global_batch_size

    def step(self, number: int = 0, delay_s: float = 0.0) -> tuple[float, StepResult]:
        """Train one step; its time in seconds, and what it found.

        Args:
            number: of the step; the next one unless it is given.
            delay_s: so long this rank dawdles, as part of its own work.
        """
        started_s = time.perf_counter()
        number = number or self.num_steps + 1
        self.groups.recorder.begin_step(number, "loading data")
        self.training.start_clock()
        time.sleep(delay_s)
        result = self.training.run(self._batches.batch(self.num_steps * self._batch_size), number)
        self.num_steps += 1
        return time.perf_counter() - started_s, result


def run_recipe(main: RankMain, args: argparse.Namespace, overrides: Sequence[str] = ()) -> None:
    """Let all ranks of a recipe run `main`, watched as in training; `overrides` come before those of the user."""
    cfg = load_config(args.recipe, [*overrides, "run.steps=1000000", *args.overrides])
    with tempfile.TemporaryDirectory() as folder:
        cfg = replace(cfg, run=replace(cfg.run, dir=folder))
        check_config(cfg)
        prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        device_type = choose_device(cfg.run.device, cfg.parallel.world_size, None)
        run_ranks(partial(_rank, main, cfg, args), cfg.parallel.world_size, device_type, None)


def parser(text: str | None) -> argparse.ArgumentParser:
    """A command line with a recipe and overrides."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--recipe", type=Path, default=RECIPE)
    made.add_argument("overrides", nargs="*", metavar="section.key=value")
    return made


def _rank(main: RankMain, cfg: Config, args: argparse.Namespace, place: RankEnv, device_type: str) -> int:
    with _watched(cfg, place, device_type) as groups:
        main(cfg, RankRun(cfg, place, groups), args)
    return 0


@contextmanager
def _watched(cfg: Config, place: RankEnv, device_type: str) -> Iterator[ParallelGroups]:
    limit_s = cfg.faults.timeout_s
    watchdog = Watchdog(place, limit_s, device_type)
    with init_distributed(place, device_type, limit_s, watchdog.start) as device, watchdog:
        yield ParallelGroups.create(check_config(cfg), device, watchdog.flight_recorder)
