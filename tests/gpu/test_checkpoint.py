"""Checkpoints between CPU and GPU: each goes on from a checkpoint of the other. Needs CUDA and NCCL."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.find_checkpoint import complete_checkpoints
from moefold.checkpoint.stored_tensors import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.launch.ranks import init_distributed, single_rank_env
from moefold.train.callbacks.callback import TrainingContext
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.tiny_runs import losses
from tests.verify.recipes import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _recipe(run_dir: Path, steps: int, *, async_save: bool = False, resume: str = "auto") -> Config:
    sizes = {"hidden_size": 64, "attention.head_dim": 16, "ffn.moe.intermediate_size": 64, "init_std": 0.05}
    cfg = tiny(model=sizes, train={"seq_len": 64, "global_batch_size": 8, "micro_batch_size": 4})
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, dtype="float32"),
        train=replace(cfg.train, lr_schedule="constant"),
        checkpoint=CheckpointConfig(every=2, async_save=async_save, resume=resume),
    )


def _train(cfg: Config, device_type: str) -> None:
    cfg = replace(cfg, run=replace(cfg.run, device=device_type))
    with init_distributed(single_rank_env(), device_type) as device:
        Trainer(cfg, ParallelGroups.create(check_config(cfg), device)).run(StopSignals())


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_where_the_other_device_stopped(tmp_path, first, second, async_save):
    _train(_recipe(tmp_path / "whole", 4), second)
    _train(_recipe(tmp_path / "parts", 2, async_save=async_save), first)
    _train(_recipe(tmp_path / "parts", 4, async_save=async_save), second)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize(("writer", "reader"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_every_tensor_arrives_to_the_bit(tmp_path, writer, reader):
    """Saved, loaded by the other device, and saved there without a step."""
    _train(_recipe(tmp_path / "first", 2), writer)
    (written,) = complete_checkpoints(tmp_path / "first" / "checkpoints")
    cfg = _recipe(tmp_path / "second", 2, resume=str(written))
    cfg = replace(cfg, run=replace(cfg.run, device=reader))
    with init_distributed(single_rank_env(), reader) as device:
        trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), device))
        parts = trainer.groups, trainer.train_step, trainer.data_loader, trainer.position
        run = TrainingContext(Path(cfg.run.dir), *parts, StopSignals())
        trainer._add_states(run.states)
        trainer.checkpointing.resume(run)
        trainer.checkpointing.save(run)
    (again,) = complete_checkpoints(tmp_path / "second" / "checkpoints")
    assert differing_tensors(written, again) == []
