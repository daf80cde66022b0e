"""Construction of AdamW over the shards of all parameters, and its state by parameter name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moefold.config.schema import TrainConfig
from moefold.optim.adamw import MOMENTS, LocalShardAdamW, OffloadableAdamW
from moefold.optim.state_offload import StateStore

EXPERT_BIASES = ("experts.b_gate", "experts.b_up", "experts.b_down")
MOMENTUM = "momentum"
"""State key of Muon's momentum."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], cfg: TrainConfig, state_store: StateStore | None = None
) -> torch.optim.Optimizer:
    """Build AdamW with two param groups: weight decay skips norms, sinks and biases.

    The moments are allocated here, so that a checkpoint can be loaded into them.

    Args:
        parameters: parameters of this rank, by name.
        cfg: training section of the recipe.
        state_store: store of the moments; None: on the device.

    Raises:
        ConfigError: there is not enough memory or disk space for the moments.
    """
    groups: dict[bool, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        # Biases of experts have two dims: one row per expert.
        decays = parameter.dim() > 1 and not name.endswith(EXPERT_BIASES)
        groups.setdefault(decays, []).append(parameter)
    options = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    param_groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0, **options}
        for decays, params in groups.items()
    ]
    dtype = torch.bfloat16 if cfg.moment_dtype == "bfloat16" else None
    if dtype or state_store:
        return OffloadableAdamW(param_groups, dtype, state_store or StateStore())
    optimizer = LocalShardAdamW(param_groups)
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all param groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def named_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the moments by name: `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`; Muon's `<parameter>.momentum`."""
    return {
        f"{name}.{moment}": value
        for name, parameter in parameters.items()
        for moment, value in optimizer.state[parameter].items()
        if moment != "step"
    }


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the step count of the moments, for the bias correction after a resume."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
