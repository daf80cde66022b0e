"""Param groups of an optimizer: weight decay by the kind of a parameter, and one learning rate for all."""

from collections.abc import Mapping

import torch
from torch import nn

EXPERT_BIASES = ("experts.b_gate", "experts.b_up", "experts.b_down")


def group_by_decay(parameters: Mapping[str, nn.Parameter]) -> dict[bool, list[nn.Parameter]]:
    """Return the parameters with weight decay (True), and norms, sinks and biases (False); never without a group."""
    groups: dict[bool, list[nn.Parameter]] = {}
    if not parameters:
        # A pipeline stage may have none, in the warm-up of indexers, but torch requires a group.
        groups[False] = []
    for name, parameter in parameters.items():
        # Biases of experts have two dims: one row per expert.
        decays = parameter.dim() > 1 and not name.endswith(EXPERT_BIASES)
        groups.setdefault(decays, []).append(parameter)
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all param groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
