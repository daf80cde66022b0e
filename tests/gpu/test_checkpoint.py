"""Checkpoints between CPU and GPU: what one wrote the other goes on from. Needs CUDA and NCCL."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.checkpoint_dir import complete_checkpoints
from moefold.checkpoint.inspect import differing_tensors
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import CheckpointConfig, Config, RunConfig
from moefold.host.rank_env import RankEnv
from moefold.launch.ranks import init_distributed
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.train.test_trainer import losses
from tests.verify.recipes import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _recipe(run_dir: Path, steps: int, *, async_save: bool = False, resume: str = "auto") -> Config:
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_ffn_hidden_size": 64, "init_std": 0.05}
    cfg = tiny(model=sizes, train={"seq_len": 64, "global_batch_size": 8, "micro_batch_size": 4})
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, dtype="float32"),
        train=replace(cfg.train, lr_schedule="constant"),
        checkpoint=CheckpointConfig(every=2, async_save=async_save, resume=resume),
    )


def _train(cfg: Config, device_type: str, port: int) -> None:
    cfg = replace(cfg, run=replace(cfg.run, device=device_type))
    with init_distributed(RankEnv(0, 0, 1, "127.0.0.1", port), device_type) as device:
        Trainer(cfg, ParallelGroups.create(check_config(cfg), device)).run(StopSignals())


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("first", "second", "port"), [("cuda", "cpu", 29541), ("cpu", "cuda", 29551)])
def test_a_run_goes_on_where_the_other_device_stopped(tmp_path, first, second, port, async_save):
    port += 20 * async_save
    _train(_recipe(tmp_path / "whole", 4), second, port)
    _train(_recipe(tmp_path / "parts", 2, async_save=async_save), first, port + 1)
    _train(_recipe(tmp_path / "parts", 4, async_save=async_save), second, port + 2)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize(("writer", "reader", "port"), [("cuda", "cpu", 29581), ("cpu", "cuda", 29586)])
def test_every_tensor_arrives_to_the_bit(tmp_path, writer, reader, port):
    """Saved, loaded by the other device, and saved there without a step."""
    _train(_recipe(tmp_path / "first", 2), writer, port)
    (written,) = complete_checkpoints(tmp_path / "first" / "checkpoints")
    cfg = _recipe(tmp_path / "second", 2, resume=str(written))
    cfg = replace(cfg, run=replace(cfg.run, device=reader))
    with init_distributed(RankEnv(0, 0, 1, "127.0.0.1", port + 1), reader) as device:
        trainer = Trainer(cfg, ParallelGroups.create(check_config(cfg), device))
        run = trainer._context(StopSignals())
        trainer._checkpointing.resume(run)
        trainer._checkpointing.save(run)
    (again,) = complete_checkpoints(tmp_path / "second" / "checkpoints")
    assert differing_tensors(written, again) == []
