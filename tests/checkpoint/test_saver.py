"""Checkpoints that are written while training goes on."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.saver import BackgroundSaver
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.parallel.batch import Batch
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe, records, train_rank
from tests.verify.shared_ranks import run_each

pytestmark = pytest.mark.parity

MAPPING = {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}


def _beside_training(cfg: Config) -> Config:
    return replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=True))


def test_a_save_during_training_equals_a_save_at_once(pool, tmp_path):
    at_once = recipe(tmp_path / "at-once", 2, every=1, **MAPPING)
    beside = _beside_training(recipe(tmp_path / "beside", 2, every=1, **MAPPING))
    run_each(pool, 4, train_rank, (at_once,), (beside,))
    saved = [complete_checkpoints(tmp_path / name / "checkpoints") for name in ("at-once", "beside")]
    assert [path.name for path in saved[1]] == [f"step-00000{step}" for step in (1, 2)]
    assert [differing_tensors(*pair) for pair in zip(*saved, strict=True)] == [[]] * 2
    assert [record["loss"] for record in records(tmp_path / "beside")] == [
        record["loss"] for record in records(tmp_path / "at-once")
    ]
    assert [record["save_s"] > 0 for record in records(tmp_path / "beside")] == [False, True]


@pytest.mark.slow
def test_a_run_goes_on_from_a_save_during_training(pool, tmp_path):
    pool.run(1, train_rank, recipe(tmp_path / "whole", 4, every=0))
    pool.run(4, train_rank, _beside_training(recipe(tmp_path / "parts", 2, every=2, **MAPPING)))
    pool.run(1, train_rank, recipe(tmp_path / "parts", 4, every=2))
    whole, parts = ([record["loss"] for record in records(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-9)


def _saver(cfg: Config) -> BackgroundSaver:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return BackgroundSaver(cfg, groups.create_background_group().handle, is_on_gpu=False)


def _position(step: int) -> TrainState:
    return TrainState(states=counted(step=step, samples=0, tokens=0))


def _change_what_is_being_saved(cfg: Config) -> None:
    saver = _saver(cfg)
    weight = torch.zeros(1000, 1000)
    for step in (1, 2):
        saver.save({"model.w": weight}, _position(step))
        weight += 1
    saver.finish()


def test_a_save_holds_the_state_at_its_begin(pool, tmp_path):
    pool.run(1, _change_what_is_being_saved, recipe(tmp_path, 1))
    first, second = complete_checkpoints(tmp_path / "checkpoints")
    (difference,) = differing_tensors(first, second)
    assert (difference.name, difference.max_abs) == ("model.w", 1.0)


def _save_slowly(cfg: Config) -> list[bool]:
    """Return whether each of two saves waited for the one before, when no file can be finished for half a second."""
    saver = _saver(cfg)
    held = threading.Event()
    saver.thread.submit(held.wait)
    waited = []
    for step in (1, 2):
        threading.Timer(0.5, held.set).start()
        waited.append(saver.save({"model.w": torch.ones(4)}, _position(step)) > 0.3)
    saver.finish()
    return waited


def test_two_are_never_written_at_a_time(pool, tmp_path):
    assert pool.run(1, _save_slowly, recipe(tmp_path, 1)) == [[False, True]]
    assert len(complete_checkpoints(tmp_path / "checkpoints")) == 2


def _save_where_it_cannot(cfg: Config) -> str:
    saver = _saver(cfg)
    saver.save({"model.w": torch.ones(4)}, _position(1))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            saver.check()
        except ConfigError as error:
            return str(error)
        time.sleep(0.01)
    return ""


def test_an_error_of_a_save_is_reported_at_the_next_step(pool, tmp_path):
    Path(tmp_path / "checkpoints").touch()
    (error,) = pool.run(1, _save_where_it_cannot, recipe(tmp_path, 1))
    assert error.startswith("the checkpoint of step 1 cannot be written to")


def _fail_beside_a_save(cfg: Config) -> str:
    """A run whose data ends while the checkpoint of its first step is being written, which takes half a second."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    trainer = Trainer(cfg, groups)
    held = threading.Event()
    assert isinstance(trainer.checkpointing.saver, BackgroundSaver)
    trainer.checkpointing.saver.thread.submit(held.wait)
    threading.Timer(0.5, held.set).start()
    next_batch = trainer.data_loader.next_batch

    def batch(first_sample: int, left_out: Sequence[range]) -> tuple[Batch, Sequence[int]]:
        if first_sample:
            raise ConfigError("the data ends")
        return next_batch(first_sample, left_out)

    trainer.data_loader.next_batch = batch  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="the data ends"):
        trainer.run(StopSignals())
    return cfg.run.dir


def test_a_run_that_fails_lets_the_save_under_way_end(pool, tmp_path):
    pool.run(2, _fail_beside_a_save, _beside_training(recipe(tmp_path, 3, every=1, world_size=2)))
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-000001"]
