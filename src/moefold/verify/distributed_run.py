"""Distributed run of `moefold verify`: train under the recipe's mapping and gather the full tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.comm.sharded_tensor import full_tensors
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.schema import Config
from moefold.data.dataset import DataRequest, Dataset, ProgramData
from moefold.model.loss_function import LossFunction
from moefold.model.weight_init import draw_adapter_outputs
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.progress import ProgressCallback, ignore_progress
from moefold.train.batch_sharding import BatchSharder
from moefold.train.step_meter import StepResult
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config


@dataclass(frozen=True)
class DistributedRecord:
    """Results of one rank after a run. Only the first rank of a pipeline stage has its tensors."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    steps: tuple[StepResult, ...]
    eval_loss: float
    program_loss: str = ""
    """Class of the loss given by the program. "": the class in the recipe."""


def run_distributed(
    cfg: Config,
    num_steps: int,
    on_progress: ProgressCallback = ignore_progress,
    *,
    loss: LossFunction | None = None,
    data: ProgramData | None = None,
) -> DistributedRecord:
    """Train `num_steps` steps under the recipe's mapping. See `run_on_groups`. It is collective over the group."""
    on_progress(f"mapping on {cfg.parallel.world_size} ranks, connecting")
    return run_on_groups(create_groups(cfg), cfg, num_steps, on_progress, loss=loss, data=data)


def create_groups(cfg: Config) -> ParallelGroups:
    """Create the process groups of the recipe's mapping on CPU. It is collective over the process group."""
    return ParallelGroups.create(check_config(cfg), torch.device("cpu"))


def run_on_groups(
    groups: ParallelGroups,
    cfg: Config,
    num_steps: int,
    on_progress: ProgressCallback = ignore_progress,
    *,
    loss: LossFunction | None = None,
    data: ProgramData | None = None,
) -> DistributedRecord:
    """Train one or more steps on the groups of the recipe's mapping. It is collective.

    Records the gradients of the first step, before clipping, if the optimizer has gradients, and evaluates the final
    weights on the first validation batch.

    Args:
        loss: the loss. None means the recipe's loss.
        data: the samples of data.kind="program". None means the recipe's samples.
    """
    ranks = f"mapping on {groups.world.size} ranks"
    on_progress(f"{ranks}, building the model")
    model = parallelize(cfg, groups, loss)
    for stage in model.stages:
        draw_adapter_outputs(stage, cfg.model, cfg.run.seed)
    dataset = data or open_samples(cfg)
    loader = BatchSharder(dataset.train, cfg.batch_shape, groups, model.positions)
    training = TrainingStep(model, cfg)
    initial = gather_full_tensors(model)
    gradients: dict[str, Tensor] = {}

    def record_gradients() -> tuple[bool, ...]:
        on_progress(f"{ranks}, gathering {len(initial)} tensors of gradients")
        gradients.update(gather_full_tensors(model, gradients=True))
        return ()

    has_gradients = chosen_in(cfg.train, OptimizerPart).needs_gradients
    steps = []
    for i in range(num_steps):
        on_progress(f"{ranks}, step {i + 1} of {num_steps}")
        batch = loader.batch(i * cfg.train.global_batch_size)
        # Stop flags are read between the backward pass and clipping.
        steps.append(training.run_polled(batch, i + 1, record_gradients if has_gradients and i == 0 else tuple))
    on_progress(f"{ranks}, evaluation and gathering of the weights")
    held_out = BatchSharder(dataset.validation, cfg.batch_shape, groups, model.positions)
    final = gather_full_tensors(model)
    eval_loss = training.evaluate([held_out.batch(0)])
    program_loss = "" if loss is None else type(loss).__name__
    return DistributedRecord(initial, gradients, final, tuple(steps), eval_loss, program_loss)


def open_samples(cfg: Config) -> Dataset:
    """Open the data of a recipe. The reference of pairs has a uniform distribution, because no pass computes it."""
    dataset = DataRequest.of(cfg).open()
    if dataset.reference is not None:
        dataset.reference.fill_uniform(cfg.model.vocab_size)
    return dataset


def gather_full_tensors(model: ParallelModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Gather parameters and buffers, or gradients, as full tensors on a stage's first rank. It is collective."""
    is_first = model.groups.attn.dp_cp.rank == 0 and model.groups.attn.tp.rank == 0
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters.items():
        if gradients and not parameter.requires_grad:
            continue
        tensor = parameter.grad if gradients else parameter.data
        if tensor is None:
            raise ValueError(f"{name} has no gradient")
        tensors[name] = tensor
    gathered = {name: full.detach().clone() for name, full in full_tensors(tensors) if is_first}
    if is_first and not gradients:
        gathered |= {name: buffer.detach().clone() for name, buffer in model.named_buffers.items()}
    return gathered
