"""Training loop of one rank, called step by step by benchmarks that vary what runs concurrently with it."""

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
from moefold.data.dataset import DataRequest
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import choose_device, init_distributed, run_ranks
from moefold.launch.watchdog import Watchdog
from moefold.parallel.parallelize import parallelize
from moefold.recipe import load_config
from moefold.train.batch_sharding import BatchSharder
from moefold.train.step_meter import StepResult
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"

RankMain = Callable[[Config, "RankTrainer", argparse.Namespace], None]


class RankTrainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, cfg: Config, rank_env: RankEnv, groups: ParallelGroups) -> None:
        model = parallelize(cfg, groups)
        data = DataRequest.of(cfg).open()
        self.is_first = rank_env.rank == 0
        self.groups = groups
        self.training = TrainingStep(model, cfg)
        self.num_steps = 0
        self._batches = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
        self._batch_size = cfg.train.global_batch_size

    def step(self, number: int = 0, delay_s: float = 0.0) -> tuple[float, StepResult]:
        """Train one step; return its duration in seconds and its result.

        Args:
            number: step number; 0: the next one.
            delay_s: time that this rank sleeps, counted as its compute time.
        """
        started_s = time.perf_counter()
        number = number or self.num_steps + 1
        self.groups.recorder.begin_step(number, "loading data")
        with self.training.meter.loading():
            batch = self._batches.batch(self.num_steps * self._batch_size)
        time.sleep(delay_s)
        result = self.training.run(batch, number)
        self.num_steps += 1
        return time.perf_counter() - started_s, result


def run_recipe(main: RankMain, args: argparse.Namespace, overrides: Sequence[str] = ()) -> None:
    """Run `main` on all ranks of a recipe, with the watchdog of training; the user's overrides replace `overrides`."""
    cfg = load_config(args.recipe, [*overrides, "run.steps=1000000", *args.overrides])
    with tempfile.TemporaryDirectory() as folder:
        cfg = replace(cfg, run=replace(cfg.run, dir=folder))
        check_config(cfg)
        DataRequest.of(cfg).prepare()
        device_type = choose_device(cfg.run.device, cfg.parallel.world_size, None)
        run_ranks(partial(_rank, main, cfg, args), cfg.parallel.world_size, device_type, None)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Build a command-line parser with a recipe and overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipe to train (default quickstart)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override recipe keys")
    return parser


def _rank(main: RankMain, cfg: Config, args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    with _init_rank(cfg, rank_env, device_type) as groups:
        main(cfg, RankTrainer(cfg, rank_env, groups), args)
    return 0


@contextmanager
def _init_rank(cfg: Config, rank_env: RankEnv, device_type: str) -> Iterator[ParallelGroups]:
    timeout_s = cfg.faults.timeout_s
    watchdog = Watchdog(rank_env, timeout_s, device_type)
    with init_distributed(rank_env, device_type, timeout_s, watchdog.start) as device, watchdog:
        yield ParallelGroups.create(check_config(cfg), device, watchdog.flight_recorder)
