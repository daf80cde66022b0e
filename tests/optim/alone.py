"""The optimizer of a recipe on a rank of its own."""

import torch
from torch import nn

from benchmarks.process_group import make_group
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.optim.build import build_optimizer
from moefold.optim.states import StateStore


def build_alone(
    given: dict[str, nn.Parameter],
    train: TrainConfig,
    store: StateStore | None = None,
    *,
    model: ModelConfig | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of a [train] section. Muon takes the shapes of the parameters from the model."""
    cfg = Config(model=model or ModelConfig(), train=train, run=RunConfig(seed=seed))
    return build_optimizer(given, cfg.run, cfg.model, cfg.train, cfg.lora, make_group((0,), 0, None), store)
