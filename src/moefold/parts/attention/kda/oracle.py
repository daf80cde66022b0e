"""Kimi Delta Attention (arXiv:2510.26692 eq. 1) token by token in float64."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefold.parts.attention.gated_deltanet.oracle import delta_rule


def output(part: Any, weights: Mapping[str, Tensor], x: Tensor, eps: float) -> Tensor:
    """Return the output for the tokens of one document, [S, H]."""
    logits, gates = (
        x @ weights[f"w{letter}"].T
        if part.full_rank_gates
        else x @ weights[f"w{letter}_down"].T @ weights[f"w{letter}_up"].T
        for letter in "ag"
    )
    logits = (logits + weights["dt_bias"]).view(len(x), part.num_value_heads, -1)
    rates = torch.exp(weights["a_log"])[:, None]
    if part.decay_bound:
        decays = torch.exp(part.decay_bound / (1 + torch.exp(-rates * logits)))
    else:
        decays = torch.exp(-rates * torch.log1p(torch.exp(logits)))
    return delta_rule(part, weights, x, (decays, torch.sigmoid(gates)), eps)
