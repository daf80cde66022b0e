"""Build the optimizer of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moefold.comm.groups import Group
from moefold.config.chosen import chosen_in
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.param_spec import ParamSpec
from moefold.config.schema import Config
from moefold.cost.adapter_spec import training_weights
from moefold.optim.state_offload import StateStore


@dataclass(frozen=True)
class OptimizerRun:
    """Parameters, ranks and store that an optimizer is built for."""

    weights: Mapping[str, ParamSpec]
    """Every parameter of the model, unsharded, by name."""
    stage: Group | None
    """The ranks that together hold the parameters of this rank's stage; None: a measurement without ranks."""
    lr: float
    """Learning rate of the first step; `optim.param_groups.set_learning_rate` sets it before each."""
    seed: int
    """Seed of the run."""
    state_store: StateStore | None = None
    """Store of the moments; None: on the device."""

    @property
    def store(self) -> StateStore:
        """Return the store of the moments; on the device if the recipe offloads none."""
        return self.state_store or StateStore()


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], cfg: Config, stage: Group, state_store: StateStore | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that `train.optimizer` names; may be collective over the stage.

    Args:
        parameters: parameters of this rank, by name.
        cfg: the recipe.
        stage: the ranks that together hold the parameters.
        state_store: store of the moments; None: on the device.

    Raises:
        ConfigError: there is not enough memory or disk space for the moments.
    """
    run = OptimizerRun(training_weights(cfg.model, cfg.lora), stage, cfg.train.lr, cfg.run.seed, state_store)
    optimizer: torch.optim.Optimizer = chosen_in(cfg.train, OptimizerPart).build(parameters, run)
    return optimizer
