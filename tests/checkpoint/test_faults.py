"""Faults in the middle of a save: the one before stays loadable, and the message names the step and the folder."""

import logging
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.saver import BackgroundSaver, CheckpointSaver
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.rank_pool import WorkerError
from moefold.validate.config import check_config
from tests.slow import slow
from tests.train.tiny_runs import recipe

pytestmark = pytest.mark.parity

RANKS = 2
PATIENCE_S = 60.0


def _draft(folder: Path) -> Path:
    """The folder that step 2 is written to."""
    (path,) = folder.glob(".step-000002.*.partial")
    return path


def _when_being_written(folder: Path, act: Callable[[], object]) -> None:
    """Act, in a thread, once the draft of step 2 holds the files of this rank."""

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if any(folder.glob(f".step-000002.*.partial/__{dist.get_rank()}_*")):
                act()
                return

    threading.Thread(target=watch, daemon=True).start()


def _saver(cfg: Config) -> CheckpointSaver:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    if not cfg.checkpoint.async_save:
        return CheckpointSaver(cfg)
    return BackgroundSaver(cfg, groups.create_background_group().handle, is_on_gpu=False)


def _state(rows: int = 1) -> dict[str, torch.Tensor]:
    """Return a state of some rows; 500 are enough that writing takes a while."""
    return {f"model.{dist.get_rank()}.{i}": torch.full((rows, 1000), float(i)) for i in range(20)}


def _save_twice(cfg: Config, fault: str) -> str:
    """Save step 1, then step 2 with a fault in the middle; the error of this rank."""
    folder = Path(cfg.run.dir) / "checkpoints"
    saver = _saver(cfg)
    saver.save(_state(), TrainState(states=counted(step=1, samples=0, tokens=0)))
    saver.finish()
    saver = _saver(cfg)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if fault == "killed" and is_last:
        _when_being_written(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if fault == "vanished" and is_last:
        _when_being_written(folder, lambda: folder.rename(folder.with_name("away")))
    if fault == "draft removed" and is_last:
        _when_being_written(folder, lambda: shutil.rmtree(_draft(folder), ignore_errors=True))
    if fault == "full" and is_last:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    try:
        saver.save(_state(500), TrainState(states=counted(step=2, samples=0, tokens=0)))
        saver.finish()
    except ConfigError as error:
        return str(error)
    return ""


def _recipe(run_dir: Path, async_save: bool) -> Config:
    cfg = recipe(run_dir, 4, every=1, world_size=RANKS)
    return replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=async_save))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_rank_that_is_killed_in_a_save_leaves_the_one_before(pool, tmp_path, async_save):
    cfg = _recipe(tmp_path, async_save)
    with pytest.raises(WorkerError, match="died"):
        pool.run(RANKS, _save_twice, cfg, "killed")
    (left,) = complete_checkpoints(tmp_path / "checkpoints")
    assert left.name == "step-000001"
    assert _draft(tmp_path / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("async_save", "fault"),
    [(True, "vanished"), (False, "draft removed"), *slow([(True, "draft removed"), (False, "vanished")])],
)
def test_a_folder_that_vanishes_in_a_save_is_one_message_on_all_ranks(pool, tmp_path, fault, async_save):
    errors = pool.run(RANKS, _save_twice, _recipe(tmp_path, async_save), fault)
    for error in errors:
        assert "the checkpoint of step 2 cannot be written to" in error or "was removed while it was written" in error
        assert "\n" not in error
    if fault == "vanished":
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "checkpoints")
    (left,) = complete_checkpoints(tmp_path / "checkpoints")
    assert left.name == "step-000001"


class _Kept(logging.Handler):
    """Keeps the logged messages."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def _save_around_a_loss(cfg: Config, is_lost: bool) -> list[str]:
    """Save steps 1 and 2, between which the folder is moved away; return the messages of this rank."""
    kept, logger = _Kept(), logging.getLogger("moefold.checkpoint.saver")
    logger.addHandler(kept)
    folder = Path(cfg.run.dir) / "checkpoints"
    saver = _saver(cfg)
    for step in (1, 2):
        saver.save(_state(), TrainState(states=counted(step=step, samples=0, tokens=0)))
        saver.drain()
        dist.barrier()
        if is_lost and step == 1 and dist.get_rank() == 0:
            folder.rename(folder.with_name("away"))
        dist.barrier()
    saver.finish()
    logger.removeHandler(kept)
    return kept.words


@pytest.mark.parametrize(
    ("async_save", "is_lost"), [(True, False), (False, True), *slow([(True, True), (False, False)])]
)
def test_a_folder_that_vanishes_between_saves_is_noted_and_made_anew(pool, tmp_path, async_save, is_lost):
    words = pool.run(RANKS, _save_around_a_loss, _recipe(tmp_path, async_save), is_lost)
    first = tmp_path / "checkpoints" / "step-000001"
    if not is_lost:
        assert words == [[], []]
        return
    gone = f"the last checkpoint, '{first}', is gone since it was written; the next is saved to the same folder"
    assert words == [[gone], []]
    assert [path.name for path in complete_checkpoints(first.parent)] == ["step-000002"]
    assert [path.name for path in complete_checkpoints(tmp_path / "away")] == ["step-000001"]


@pytest.mark.parametrize("async_save", [*slow([(False,)]), True])
def test_a_full_disk_ends_a_save_with_one_message_on_all_ranks(fresh_pool, tmp_path, async_save):
    for error in fresh_pool.run(RANKS, _save_twice, _recipe(tmp_path, async_save), "full"):
        assert error.startswith(f"the checkpoint of step 2 cannot be written to '{tmp_path}/checkpoints': file __1_")
        assert "could not be written to its end" in error
    (left,) = complete_checkpoints(tmp_path / "checkpoints")
    assert left.name == "step-000001"
