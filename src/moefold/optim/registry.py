"""The optimizer by its name in the recipe."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from moefold.comm.groups import Group
from moefold.config.schema import Config
from moefold.optim.adamw import build_optimizer
from moefold.optim.muon import build_muon
from moefold.optim.spsa import build_spsa
from moefold.optim.state_offload import StateStore

OptimizerBuilder = Callable[[Mapping[str, nn.Parameter], Config, Group, StateStore | None], torch.optim.Optimizer]


def _build_adamw(
    parameters: Mapping[str, nn.Parameter], cfg: Config, stage: Group, state_store: StateStore | None
) -> torch.optim.Optimizer:
    return build_optimizer(parameters, cfg.train, state_store)


BUILDERS: dict[str, OptimizerBuilder] = {"adamw": _build_adamw, "muon": build_muon, "spsa": build_spsa}
"""How to build each optimizer of `cost/optimizers.py`."""


def make_optimizer(
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
    return BUILDERS[cfg.train.optimizer](parameters, cfg, stage, state_store)
