"""Runs that are killed again and again end with the weights of an uninterrupted run."""

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from moefold.checkpoint.find_checkpoint import complete_checkpoints, step_of
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.config.schema import Config
from moefold.launch.rank_pool import WorkerError, WorkerPool
from tests.train.tiny_runs import recipe, records, train_rank

pytestmark = pytest.mark.parity

RANKS = 2
STEPS_PER_LIFE = 6
"""More steps than a run can take before it is killed, so that every kill comes before the end."""
LIFE_S = (0.1, 0.35)
LAST_LIFE_S = 900.0
"""Time to train to the end."""


def _live(cfg: Config, life_s: float, killed: tuple[int, ...], saves_first: bool) -> int:
    """Train until the end, or until this rank's life is over: SIGKILL, which nothing can catch.

    Args:
        cfg: the recipe.
        life_s: how long it is.
        killed: the ranks that die.
        saves_first: it is counted from the first checkpoint that it completes: on a busy machine few come to one.
    """
    folder = Path(cfg.run.dir) / "checkpoints"
    before = complete_checkpoints(folder)[-1:]

    def die() -> None:
        while saves_first and complete_checkpoints(folder)[-1:] == before:
            time.sleep(0.01)
        time.sleep(life_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() in killed:
        threading.Thread(target=die, daemon=True).start()
    return train_rank(cfg)


def _campaign(pool: WorkerPool, run_dir: Path, kills: int, *, async_save: bool, seed: int) -> dict[str, int]:
    """Kill one rank or all, at random moments, until the count is full, a line for each (-s); then let the run end.

    Returns:
        The number of deaths, the number of deaths while a save was surely under way, and after a new checkpoint.
    """
    folder = run_dir / "checkpoints"
    chance = random.Random(seed)
    cfg = recipe(run_dir, STEPS_PER_LIFE * kills, every=1, world_size=RANKS, ep=2)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=async_save, keep=2))
    deaths = in_saves = after_saves = newest = 0
    drafts: set[str] = set()
    while deaths < kills:
        killed = chance.choice([(0,), (1,), (0, 1)])
        saves_first = deaths % 2 == 1
        life_s = chance.uniform(*LIFE_S) / (2 if saves_first else 1)
        with pytest.raises(WorkerError, match="died"):
            pool.run(RANKS, _live, cfg, life_s, killed, saves_first)
        deaths += 1
        seen, drafts = drafts, {path.name for path in folder.glob(".step-*.partial")}
        before, newest = newest, max(map(step_of, complete_checkpoints(folder)), default=0)
        in_saves += bool(drafts - seen)  # at least so many: a draft of the same step may be a new one too
        after_saves += newest > before
        since = "the first checkpoint" if saves_first else "the start"
        print(f"{deaths}: {killed} killed {life_s:.2f} s after {since}; drafts: {sorted(drafts)}; newest: {newest}")
    # Nothing ends the last life, which needs no save but the save at its end.
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every=cfg.run.steps))
    pool.run(RANKS, train_rank, cfg, timeout_s=LAST_LIFE_S)
    return {"deaths": deaths, "in saves": in_saves, "after saves": after_saves}


def _assert_nothing_is_lost(pool: WorkerPool, tmp_path: Path, kills: int, *, async_save: bool) -> dict[str, int]:
    found = _campaign(pool, tmp_path / "killed", kills, async_save=async_save, seed=kills + async_save)
    print(found)
    steps = STEPS_PER_LIFE * kills
    pool.run(
        RANKS, train_rank, recipe(tmp_path / "whole", steps, every=steps, world_size=RANKS, ep=2), timeout_s=LAST_LIFE_S
    )
    last = [complete_checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("killed", "whole")]
    assert [path.name for path in last] == [f"step-{steps:06d}"] * 2
    assert differing_tensors(*last) == []
    losses = [[(r["step"], r["loss"]) for r in records(tmp_path / name)] for name in ("killed", "whole")]
    assert losses[0] == losses[1]
    assert found["after saves"] >= kills // 2
    return found


def test_two_kills_lose_nothing(pool, tmp_path):
    _assert_nothing_is_lost(pool, tmp_path, 2, async_save=True)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_ten_kills_lose_nothing(pool, tmp_path, async_save):
    assert _assert_nothing_is_lost(pool, tmp_path, 10, async_save=async_save)["in saves"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_hundred_kills_lose_nothing(pool, tmp_path, async_save):
    found = _assert_nothing_is_lost(pool, tmp_path, 100, async_save=async_save)
    assert found["in saves"] > 0
