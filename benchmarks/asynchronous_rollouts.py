"""Measure the step time with sampling on separate ranks against alternating with training. Phases are timed waits.

    PYTHONPATH=. python benchmarks/asynchronous_rollouts.py [--phase-ms 300] [--jitter 0.5] [--steps 16]

Two ranks train. They also sample, alternating, or two further ranks sample meanwhile. Both phases are real, with a tiny
model, but end at the earliest `phase-ms` after their start. So each rank has the time of a core even if two cores serve
four ranks. With jitter a round of sampling takes 1 - jitter to 1 + jitter times as long, as rounds with long rollouts
do. The alternating run has the same staleness and the same result, bit by bit.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

from moefold.config.schema import Config
from moefold.inference.rollouts import RolloutCollector
from moefold.launch.ranks import spawn_ranks
from moefold.recipe import load_config
from moefold.train.run_folder import RunFolder
from moefold.train.start import RunSetup
from moefold.train.train_step import TrainingStep
from moefold.train.worker import train_worker

FIRST_STEPS = 4
"""Steps that are left out: the first ones fill the table of rollouts."""


def lasting(function: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
    """Return a function that ends after some seconds at the earliest."""

    def timed(*args: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + seconds()
        result = function(*args, **options)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result

    return timed


def recipe(folder: str, steps: int, staleness: int, ranks: int) -> Config:
    """Return the recipe of a run on two training ranks."""
    settings = [
        "model.preset=tiny",
        "data.kind=task",
        "data.task=sort",
        "data.task_size=3",
        "train.seq_len=128",
        "train.global_batch_size=16",
        "train.micro_batch_size=4",
        "rl.group_size=4",
        "rl.objective=clip",
        f"rl.staleness={staleness}",
        f"rollout.ranks={ranks}",
        "rollout.max_tokens=5",
        "parallel.world_size=2",
        "run.device=cpu",
        f"run.steps={steps}",
        f"run.dir={folder}",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
    ]
    return load_config(None, settings)


def step_seconds(cfg: Config) -> float:
    """Run a recipe and return the mean time of a step."""
    with redirect_stdout(StringIO()):
        setup = RunSetup(cfg, (), RunFolder(cfg), None, None)
        status = spawn_ranks(partial(train_worker, setup), cfg.num_job_ranks, "cpu")
    assert status == 0
    lines = (Path(cfg.run.dir) / "metrics.jsonl").read_text().splitlines()
    return mean(json.loads(line)["step_time_s"] for line in lines[FIRST_STEPS:])


def main() -> None:
    """Run and print one line for each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-ms", type=float, default=300.0)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    phase_s = args.phase_ms / 1000
    draws = random.Random(0)
    RolloutCollector.collect = lasting(  # type: ignore[method-assign]
        RolloutCollector.collect, lambda: phase_s * (1 + args.jitter * (2 * draws.random() - 1))
    )
    TrainingStep.run = lasting(TrainingStep.run, lambda: phase_s)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        in_turn = step_seconds(recipe(f"{folder}/turn", args.steps, 1, 0))
        print(f"2 ranks in turn: {1000 * in_turn:.0f} ms a step")
        for staleness in args.staleness:
            split = step_seconds(recipe(f"{folder}/{staleness}", args.steps, staleness, 2))
            print(f"2 + 2 ranks, staleness {staleness}: {1000 * split:.0f} ms a step, {in_turn / split:.2f} x")


if __name__ == "__main__":
    main()
