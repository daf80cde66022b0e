"""The stages of the trainer's callbacks: their order, and the fields of a step that each may set."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe, records


class SetsTheLoss(StageCallback):
    """Callback that sets a field of the stage EVALUATION."""

    stage = CallbackStage.EVALUATION

    def complete(self, context: Any, step: FinishedStep) -> FinishedStep:
        return replace(step, eval_loss=1.5)


class SetsItLate(SetsTheLoss):
    stage = CallbackStage.SAVE


def test_a_callback_sets_only_fields_of_its_stage():
    batch = result = cast(Any, SimpleNamespace())
    step = FinishedStep(1, result, batch, step_time_s=0.1, num_tokens=8, is_last=False, signals=())
    run = cast(Any, None)
    assert SetsTheLoss().complete_in_stage(run, step) == replace(step, eval_loss=1.5)
    with pytest.raises(AssertionError, match="eval_loss"):
        SetsItLate().complete_in_stage(run, step)


def _train_in_order(cfg: Config, is_reversed: bool) -> list[str]:
    """Train with the callbacks of each stage in one of both orders and return their names."""
    trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    if is_reversed:
        backwards = list(trainer.callbacks)
        backwards.reverse()
        trainer.callbacks = tuple(sorted(backwards, key=lambda callback: callback.stage))
        trainer.callbacks_after_step = trainer.callbacks
    assert trainer.run(StopSignals()) == 0
    return [type(callback).__name__ for callback in trainer.callbacks_after_step]


def _values(run_dir: Path) -> list[dict[str, Any]]:
    names = ("step", "loss", "grad_norm", "eval_loss", "tokens", "moe_layers")
    return [{name: one[name] for name in names} for one in records(run_dir)]


@pytest.mark.parity
def test_the_order_in_a_stage_changes_nothing(pool, tmp_path):
    cfgs = [recipe(tmp_path / name, 2, every=1, train={"eval_every": 1}) for name in ("one", "other")]
    cfgs = [replace(cfg, moe=replace(cfg.moe, trace_every=1)) for cfg in cfgs]
    (one,) = pool.run(1, _train_in_order, cfgs[0], False)
    (other,) = pool.run(1, _train_in_order, cfgs[1], True)
    assert one != other
    assert sorted(one) == sorted(other)
    assert one[-1] == other[-1] == "Checkpointing"
    values = [_values(Path(cfg.run.dir)) for cfg in cfgs]
    assert values[0] == values[1]
    assert values[0][1]["eval_loss"] is not None
