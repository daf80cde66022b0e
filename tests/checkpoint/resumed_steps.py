"""Steps of a run between two checkpoints."""

from pathlib import Path

import torch

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.load import load_checkpoint
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config


def train_steps(cfg: Config, first: int, last: int, resume: str) -> list[float]:
    """Train steps first+1 .. last after loading `resume`, save, and return the losses."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    model = parallelize(cfg, groups)
    training = TrainingStep(model, cfg)
    samples = 0
    if resume:
        meta = load_checkpoint(Path(resume), training.parameters, training.buffers, training.optimizer)
        training.load_state_dict({"moment_updates": first})
        assert meta.step == first
        samples = meta.samples
    data = DataRequest.of(cfg).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    losses = []
    for step in range(first + 1, last + 1):
        losses.append(training.run(loader.batch(samples), step).loss)
        samples += cfg.train.global_batch_size
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    write_checkpoint(cfg, state, TrainState(states=counted(step=last, samples=samples, tokens=0)))
    return losses
