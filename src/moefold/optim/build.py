"""Build the optimizer of a recipe."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moefold.comm.groups import Group
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import checked_build, describe_part
from moefold.config.base.part_registry import is_built_in
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.model import ModelConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.adapter_spec import training_weights
from moefold.errors import ConfigError
from moefold.optim.states import StateStore


@dataclass(frozen=True)
class OptimizerRun:
    """Parameters, ranks and store that an optimizer is built for."""

    weights: Mapping[str, ParamSpec]
    """Every parameter of the model, unsharded, by name."""
    stage: Group | None
    """The ranks that together hold the parameters of this rank's stage. None means a measurement without ranks."""
    lr: float
    """Learning rate of the first step. `optim.states.set_learning_rate` sets it before each."""
    seed: int
    """Seed of the run."""
    state_store: StateStore | None = None
    """Store of the moments. None means on the device."""

    @property
    def store(self) -> StateStore:
        """Store of the moments, on the device if the recipe offloads none."""
        return self.state_store or StateStore()


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    run_config: RunConfig,
    model: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    stage: Group,
    state_store: StateStore | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that `train.optimizer` names. It may be collective over the stage.

    Args:
        parameters: parameters of this rank, by name.
        stage: the ranks that together hold the parameters.
        state_store: store of the moments. None means on the device.

    Raises:
        ConfigError: there is not enough memory or disk space for the moments, or an optimizer of another package has
            other states than it lists.
    """
    part = chosen_in(train, OptimizerPart)
    weights = training_weights(model, lora)
    run = OptimizerRun(weights, stage, train.lr, run_config.seed, state_store)
    optimizer = checked_build(part, part.build(parameters, run), torch.optim.Optimizer)
    if not is_built_in(type(part)):
        for name, parameter in parameters.items():
            _check_states(part, weights[name], optimizer.state.get(parameter, {}))
    return optimizer


def _check_states(part: OptimizerPart, weight: ParamSpec, names: Collection[str]) -> None:
    state_names = {state.name for state in part.states(weight)}
    if state_names != set(names):
        fault = f"the states {sorted(names)} of {weight.name}, and states() lists {sorted(state_names)}"
        raise ConfigError(f"{describe_part(part)} has {fault}")
