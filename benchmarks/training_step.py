"""The trainer's step over random tokens, for stages that measure it."""

import torch

from moefold.bench.our_step import draw_weights
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel, make_runner
from moefold.parallel.parallelize import build_sharded_stages
from moefold.train.train_step import TrainingStep


def random_batch(cfg: Config, device: torch.device) -> Batch:
    """Return a batch of random tokens, on one rank."""
    samples = cfg.train.global_batch_size
    tokens = torch.randint(cfg.model.vocab_size, (samples, cfg.train.seq_len), device=device)
    weights = torch.full(tokens.shape, 1.0 / tokens.numel(), device=device)
    columns = {"labels": tokens.roll(-1, 1), "weights": weights, "sample_ids": torch.arange(samples).to(device)}
    return Batch(tokens, columns)


def build_training_step(cfg: Config, groups: ParallelGroups) -> TrainingStep:
    """Build the trainer's step with weights that are drawn on the device."""
    sharded = build_sharded_stages(cfg, groups, for_training=True)
    for module in sharded.stages:
        draw_weights(module, cfg.run, cfg.model)
    runner = make_runner(sharded.stages, sharded.stage_plan, groups, cfg.run, cfg.model, cfg.parallel, cfg.train)
    model = ParallelModel(**vars(sharded), runner=runner)
    return TrainingStep(model, cfg)
