"""Runs that are killed again and again end with the weights of one that never was."""

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moefold.checkpoint.content import differing_tensors
from moefold.checkpoint.folder import complete_checkpoints
from moefold.config.schema import Config
from moefold.testing.pool import WorkerError, WorkerPool
from tests.train.test_trainer import _train, recipe, records

pytestmark = pytest.mark.parity

RANKS = 2
STEPS_PER_LIFE = 25
"""More than a life has time for, so that the run is not through before its last death."""
LIFE_S = (0.15, 0.6)


def _live(cfg: Config, life_s: float, killed: tuple[int, ...]) -> int:
    """Train until the end, or until this rank's life is over: SIGKILL, which nothing can catch."""
    if dist.get_rank() in killed:
        threading.Timer(life_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return _train(cfg)


def _campaign(pool: WorkerPool, run_dir: Path, kills: int, *, async_save: bool, seed: int) -> dict[str, int]:
    """Kill one rank or all, at random moments, until the count is full; then let the run end.

    Returns:
        The number of deaths, and of those in which a save was under way.
    """
    chance = random.Random(seed)
    cfg = recipe(run_dir, STEPS_PER_LIFE * kills, every=1, world_size=RANKS, ep=2)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=async_save, keep=2))
    deaths = in_saves = 0
    while deaths < kills:
        killed = chance.choice([(0,), (1,), (0, 1)])
        with pytest.raises(WorkerError, match="died"):
            pool.run(RANKS, _live, cfg, chance.uniform(*LIFE_S), killed)
        deaths += 1
        in_saves += any((run_dir / "checkpoints").glob(".step-*.partial"))
    pool.run(RANKS, _train, cfg)
    return {"deaths": deaths, "in saves": in_saves}


def _assert_nothing_is_lost(pool: WorkerPool, tmp_path: Path, kills: int, *, async_save: bool) -> None:
    found = _campaign(pool, tmp_path / "killed", kills, async_save=async_save, seed=kills + async_save)
    print(found)
    steps = STEPS_PER_LIFE * kills
    pool.run(RANKS, _train, recipe(tmp_path / "whole", steps, every=steps, world_size=RANKS, ep=2))
    last = [complete_checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("killed", "whole")]
    assert [path.name for path in last] == [f"step-{steps:06d}"] * 2
    assert differing_tensors(*last) == []
    losses = [[(r["step"], r["loss"]) for r in records(tmp_path / name)] for name in ("killed", "whole")]
    assert losses[0] == losses[1]
    assert found["in saves"] > 0


@pytest.mark.parametrize("async_save", [False, True])
def test_ten_kills_lose_nothing(pool, tmp_path, async_save):
    _assert_nothing_is_lost(pool, tmp_path, 10, async_save=async_save)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_hundred_kills_lose_nothing(pool, tmp_path, async_save):
    _assert_nothing_is_lost(pool, tmp_path, 100, async_save=async_save)
