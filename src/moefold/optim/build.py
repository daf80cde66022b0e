"""AdamW over the shards of all parameters, and its state by parameter name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moefold.config.schema import TrainConfig
from moefold.optim.adamw import MOMENTS, LocalShardAdamW, OffloadableAdamW
from moefold.optim.state_offload import StateStore

EXPERT_BIASES = ("experts.b_gate", "experts.b_up", "experts.b_down")
MOMENTUM = "momentum"
"""Of Muon."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], cfg: TrainConfig, state_store: StateStore | None = None
) -> torch.optim.Optimizer:
    """AdamW of two groups: weight decay skips norms, sinks and biases.

    The moments exist from the start, so that a checkpoint can be read into them.

    Args:
        parameters: of this rank, by name.
        cfg: the recipe's.
        state_store: where the moments live; None: beside the weights.

    Raises:
        ConfigError: there is no room for them.
    """
    groups: dict[bool, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        # The biases of experts have two dims: one row for each expert.
        decays = parameter.dim() > 1 and not name.endswith(EXPERT_BIASES)
        groups.setdefault(decays, []).append(parameter)
    options = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    described: list[dict[str, Any]] = [
        {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0, **options}
        for decays, params in groups.items()
    ]
    dtype = torch.bfloat16 if cfg.moment_dtype == "bfloat16" else None
    if dtype or state_store:
        return OffloadableAdamW(described, dtype, state_store or StateStore())
    optimizer = LocalShardAdamW(described)
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The moments by name, as `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`; Muon's as `<parameter>.momentum`."""
    return {
        f"{name}.{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state[parameter].items()
        if moment != "step"
    }


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Say how many steps the moments have seen, for the bias correction after a resume."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
