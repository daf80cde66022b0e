"""Garbage is collected at the same steps on all ranks, and a step leaves no tensor to it."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.data.dataset import DataRequest
from moefold.errors import RunError
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.callbacks.callback import Callback
from moefold.train.signals import StopSignals
from moefold.train.train_step import TrainingStep
from moefold.train.trainer import STEPS_BETWEEN_COLLECTIONS, Trainer, collect_at_fixed_steps
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.recipes import tiny


class _Node:
    pass


def _cycle() -> weakref.ref[_Node]:
    node = _Node()
    node.itself = node
    return weakref.ref(node)


def test_a_cycle_is_collected_at_the_steps_that_are_due():
    with collect_at_fixed_steps() as collect:
        found = _cycle()
        for step in range(1, STEPS_BETWEEN_COLLECTIONS):
            collect(step)
            assert found() is not None
        collect(STEPS_BETWEEN_COLLECTIONS)
        assert found() is None


def _fail(frozen: int) -> None:
    with collect_at_fixed_steps():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
        raise RunError("a rank is lost")


def _restored_after_an_error(was_enabled: bool) -> tuple[bool, int]:
    gc.unfreeze()
    if not was_enabled:
        gc.disable()
    with pytest.raises(RunError):
        _fail(gc.get_freeze_count())
    return gc.isenabled(), gc.get_freeze_count()


# In ranks: this process has all tests, a million objects, to search.
@pytest.mark.parametrize("was_enabled", [True, False])
def test_earlier_settings_are_restored_after_an_error(fresh_pool, was_enabled):
    assert fresh_pool.run(1, _restored_after_an_error, was_enabled) == [(was_enabled, 0)]


def _collect_among_frozen_objects() -> None:
    kept = _Node()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collect_at_fixed_steps() as collect:
        found = _cycle()
        collect(STEPS_BETWEEN_COLLECTIONS)
        assert found() is None
    # The caller's objects may be freed meanwhile, but none is unfrozen.
    assert 0 < gc.get_freeze_count() <= frozen
    assert not any(one is kept for one in gc.get_objects())
    gc.unfreeze()
    assert any(one is kept for one in gc.get_objects())


def test_objects_that_the_caller_froze_stay_frozen(fresh_pool):
    fresh_pool.run(1, _collect_among_frozen_objects)


class _Watch(Callback):
    def __init__(self) -> None:
        self.seen = []

    def after_step(self, context, step):
        self.seen.append(gc.isenabled())


def _run(cfg: Config):
    watch = _Watch()
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    status = Trainer(cfg, groups, callbacks=[watch]).run(StopSignals())
    return status, watch.seen, gc.isenabled()


def test_a_run_collects_only_where_it_is_due(fresh_pool, tmp_path):
    cfg = tiny(world_size=2)
    cfg = replace(cfg, run=RunConfig(dir=str(tmp_path / "run"), steps=2, device="cpu", dtype="float64"))
    assert fresh_pool.run(2, _run, cfg) == [(0, [False, False], True)] * 2


def _tensors_in_cycles(cfg: Config) -> list[str]:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    data = DataRequest.of(cfg).open()
    sharder = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    # The first step creates moments and communication buffers.
    training.run(sharder.batch(0), 1)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    size = cfg.train.global_batch_size
    training.run(sharder.batch(size), 2)
    training.evaluate([sharder.batch(size)])
    gc.collect()
    return [f"{type(one).__name__} {tuple(one.shape)}" for one in gc.garbage if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({}, {}),
        ({}, {"recompute": ("layer",)}),
        ({"ep": 2, "overlap_experts": True}, {}),
        ({"zero": 3}, {}),
        ({"pp": 2}, {}),
        *slow([({}, {"recompute": ("norms", "moe")}), *(({axis: 2}, {}) for axis in ("tp", "cp", "ep"))]),
    ],
)
def test_no_tensor_of_a_step_is_in_a_reference_cycle(fresh_pool, parallel, train):
    assert fresh_pool.run(2, _tensors_in_cycles, tiny(train=train, world_size=2, **parallel)) == [[], []]
