"""Checkpoints that lack tensors or rows, and the error of a load."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from moefold.checkpoint.checkpoint_meta import CheckpointMeta, counted, model_sizes, write_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.load import load_checkpoint
from moefold.checkpoint.resume import resolve_resume
from moefold.checkpoint.sample_order import sample_order
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.base.limits import FORMAT
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.errors import ConfigError
from moefold.optim.states import named_moments
from moefold.parallel.parallelize import parallelize
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.checkpoint.empty_checkpoints import seal
from tests.verify.recipes import tiny


def recipe(run_dir: Path, **parallel: object) -> Config:
    cfg = tiny(**parallel)
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), device="cpu", dtype="float64", seed=3),
        checkpoint=CheckpointConfig(every=1, keep=2),
    )


def training_step(cfg: Config) -> TrainingStep:
    return TrainingStep(parallelize(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu"))), cfg)


def save_broken(cfg: Config, lacks: str, cuts: str) -> None:
    """Write a checkpoint by hand, without some tensors, and with a tensor that has lost an expert."""
    training = training_step(cfg)
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
    write_meta(
        path,
        CheckpointMeta(
            format=FORMAT, states=counted(step=1, samples=4, tokens=64), order=order, model=model, parallel={}
        ),
    )
    seal(path)


def load_error(cfg: Config) -> str:
    """The error of a load on this rank, empty if there is none."""
    training = training_step(cfg)
    try:
        path = resolve_resume(cfg, current_world()).path
        assert path is not None
        load_checkpoint(path, training.parameters, training.buffers, training.optimizer)
    except ConfigError as error:
        return str(error)
    return ""
