"""What a mapping computes, gathered into whole tensors: the side of the comparison that runs on ranks."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.checks import check_config
from moefold.config.schema import Config
from moefold.data import open_dataset
from moefold.parallel.groups import ParallelGroups
from moefold.parallel.parallelize import ParallelModel, parallelize
from moefold.train.batch import BatchLoader
from moefold.train.step import StepResult, TrainingStep, whole
from moefold.work_progress import Say, say_nothing


@dataclass(frozen=True)
class MappingRecord:
    """What one rank knows after a run; the tensors of a pipeline stage come from its first rank alone."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    steps: tuple[StepResult, ...]
    eval_loss: float


def run_mapping(cfg: Config, num_steps: int, say: Say = say_nothing) -> MappingRecord:
    """Train `num_steps` steps under the recipe's mapping; every rank of the process group calls it."""
    say(f"mapping on {cfg.parallel.world_size} ranks, connecting")
    return run_on(make_groups(cfg), cfg, num_steps, say)


def make_groups(cfg: Config) -> ParallelGroups:
    """The communicators of the recipe's mapping, on CPU; collective over the process group."""
    return ParallelGroups.create(check_config(cfg), torch.device("cpu"))


def run_on(groups: ParallelGroups, cfg: Config, num_steps: int, say: Say = say_nothing) -> MappingRecord:
    """Train `num_steps` steps on groups of the recipe's mapping; collective.

    Gradients are those of the first batch, before clipping; the evaluation is that of the weights after the last step
    on the first validation batch.
    """
    ranks = f"mapping on {groups.world.size} ranks"
    say(f"{ranks}, building the model")
    model = parallelize(cfg, groups)
    data = open_dataset(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
    loader = BatchLoader(data.train, cfg, groups, model.positions)
    training = TrainingStep(model, cfg)
    initial = whole_tensors(model)
    say(f"{ranks}, gradients of the first batch")
    training.begin(1)
    model.forward_backward(loader.batch(0))
    say(f"{ranks}, gathering {len(initial)} tensors of gradients")
    gradients = whole_tensors(model, gradients=True)
    training.optimizer.zero_grad(set_to_none=True)
    steps = []
    for i in range(num_steps):
        say(f"{ranks}, step {i + 1} of {num_steps}")
        steps.append(training.run(loader.batch(i * cfg.train.global_batch_size), i + 1))
    say(f"{ranks}, evaluation and gathering of the weights")
    held_out = BatchLoader(data.validation, cfg, groups, model.positions)
    return MappingRecord(initial, gradients, whole_tensors(model), tuple(steps), training.evaluate([held_out.batch(0)]))


def whole_tensors(model: ParallelModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter and buffer, or every gradient, as a whole tensor, on the first rank of its stage; collective."""
    # Gathering whole tensors axis by axis is what this wants; torch would warn about each.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    speaks = model.groups.attn.dp_cp.rank == 0 and model.groups.attn.tp.rank == 0
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters.items():
        tensor = parameter.grad if gradients else parameter.data
        if tensor is None:
            raise ValueError(f"{name} has no gradient")
        logical = whole(tensor)
        if speaks:
            found[name] = logical.detach().clone()
    if speaks and not gradients:
        found |= {name: buffer.detach().clone() for name, buffer in model.named_buffers.items()}
    return found
