"""Checkpoints that lack something, and what a save leaves in the folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from moefold.checkpoint.folder import FORMAT, CheckpointMeta, model_sizes, sample_order, step_path, write_meta
from moefold.checkpoint.store import agree_on_resume, load_checkpoint, save_checkpoint
from moefold.config.checks import check_config
from moefold.config.schema import CheckpointConfig, Config, RunConfig
from moefold.errors import ConfigError
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import parallelize
from moefold.train.optimizer import named_moments
from moefold.train.step import TrainingStep
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

EXPERTS = "layers.1.ffn.experts.w_up"
PIPELINE = {"world_size": 2, "pp": 2}


def recipe(run_dir: Path, **parallel: object) -> Config:
    cfg = tiny(**parallel)
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), device="cpu", dtype="float64", seed=3),
        checkpoint=CheckpointConfig(every=1, keep=2),
    )


def _training(cfg: Config) -> TrainingStep:
    return TrainingStep(parallelize(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"))), cfg)


def _save(cfg: Config, steps: list[int]) -> None:
    training = _training(cfg)
    for step in steps:
        save_checkpoint(
            cfg,
            training.parameters,
            training.buffers,
            training.optimizer,
            step=step,
            samples=4 * step,
            tokens=64 * step,
            is_first_rank=dist.get_rank() == 0,
        )


def _save_broken(cfg: Config, lacks: str, cuts: str) -> None:
    """Write a checkpoint by hand, without some tensors and with one that has lost an expert."""
    training = _training(cfg)
    moments = named_moments(training.optimizer, training.parameters)
    state = {f"model.{name}": p.data for name, p in training.parameters.items()}
    state |= {f"model.{name}": buffer for name, buffer in training.buffers.items()}
    state |= {f"optimizer.{name}": moment for name, moment in moments.items()}
    state = {name: tensor for name, tensor in state.items() if not lacks or lacks not in name}
    if cuts:
        state[cuts] = state[cuts][:-1].contiguous()
    path = step_path(Path(cfg.run.dir) / "checkpoints", 1)
    dcp.save(state, checkpoint_id=path)
    model, order = model_sizes(cfg.model), sample_order(cfg)
    write_meta(path, CheckpointMeta(format=FORMAT, step=1, samples=4, tokens=64, order=order, model=model, parallel={}))


def _load(cfg: Config) -> str:
    """The error of a load on this rank, empty if there is none."""
    training = _training(cfg)
    path = agree_on_resume(cfg)
    assert path is not None
    try:
        load_checkpoint(path, training.parameters, training.buffers, training.optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_missing_tensor_is_named_on_every_rank(pool, tmp_path):
    pool.run(1, _save_broken, recipe(tmp_path), EXPERTS, "")
    errors = pool.run(2, _load, recipe(tmp_path, **PIPELINE))
    assert errors[0] == errors[1]
    names = f"tensor model.{EXPERTS}, tensor optimizer.{EXPERTS}.exp_avg, tensor optimizer.{EXPERTS}.exp_avg_sq"
    assert f"is damaged, it lacks {names}; name another one" in errors[0]


def test_many_missing_tensors_are_counted(pool, tmp_path):
    pool.run(1, _save_broken, recipe(tmp_path), "exp_avg", "")
    (error,) = pool.run(1, _load, recipe(tmp_path))
    assert "tensor optimizer.embedding.weight.exp_avg, " in error
    assert " more; name another one" in error


def test_a_missing_expert_is_named(pool, tmp_path):
    pool.run(1, _save_broken, recipe(tmp_path), "", f"model.{EXPERTS}")
    errors = pool.run(2, _load, recipe(tmp_path, world_size=2, ep=2))
    assert errors[0] == errors[1]
    assert f"it lacks model.{EXPERTS} of shape [8, 16, 8], it has [7, 16, 8]; name another one" in errors[0]


def test_a_missing_file_is_named_on_every_rank(pool, tmp_path):
    pool.run(2, _save, recipe(tmp_path, **PIPELINE), [1])
    (file,) = (tmp_path / "checkpoints" / "step-000001").glob("__1_*")
    file.unlink()
    errors = pool.run(2, _load, recipe(tmp_path, **PIPELINE))
    assert errors[0] == errors[1]
    assert f"is damaged, it lacks file {file.name}; name another one" in errors[0]


def test_a_file_that_was_cut_off_is_named(pool, tmp_path):
    pool.run(1, _save, recipe(tmp_path), [1])
    (file,) = (tmp_path / "checkpoints" / "step-000001").glob("__0_*")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    (error,) = pool.run(1, _load, recipe(tmp_path))
    assert f"is damaged, it lacks the end of file {file.name}; name another one" in error


@pytest.mark.parametrize("content", [None, b"", b"not a pickle"], ids=str)
def test_a_broken_index_is_one_message(pool, tmp_path, content):
    pool.run(1, _save, recipe(tmp_path), [1])
    index = tmp_path / "checkpoints" / "step-000001" / ".metadata"
    if content is None:
        index.unlink()
    else:
        index.write_bytes(content)
    (error,) = pool.run(1, _load, recipe(tmp_path))
    assert "cannot be read: " in error
    assert "\n" not in error


def test_saves_keep_the_newest_and_replace_the_same_step(pool, tmp_path):
    pool.run(2, _save, recipe(tmp_path, world_size=2), [1, 2, 3, 3])
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]
    assert pool.run(1, _load, recipe(tmp_path)) == [""]


def _save_refused(cfg: Config) -> str:
    with pytest.raises(ConfigError) as error:
        _save(cfg, [1])
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_one_message(pool, tmp_path):
    (tmp_path / "checkpoints").touch()
    (error,) = pool.run(1, _save_refused, recipe(tmp_path))
    assert error.startswith(f"the checkpoint of step 1 cannot be written to '{tmp_path}/checkpoints': ")
    assert "\n" not in error
