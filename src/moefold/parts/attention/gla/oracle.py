"""Gated linear attention (arXiv:2312.06635 eq. 3) in float64, without a state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefold.parts.attention.gated_deltanet.oracle import gated_norm


def output(part: Any, weights: Mapping[str, Tensor], x: Tensor, eps: float) -> Tensor:
    """Return the output for the tokens of one document, [S, H]."""
    heads = part.num_value_heads
    repeats = heads // part.num_key_heads
    queries, keys = (
        (x @ weights[f"w{letter}"].T).view(len(x), -1, part.key_head_dim).repeat_interleave(repeats, 1)
        for letter in "qk"
    )
    values, gates = ((x @ weights[f"w{letter}"].T).view(len(x), heads, -1) for letter in "vg")
    logits = x @ weights["wa_down"].T @ weights["wa_up"].T + weights["ba"]
    decays = torch.sigmoid(logits).pow(1 / 16).view(len(x), heads, -1)
    outputs = []
    for t in range(len(x)):
        # The keys of all tokens up to this one, each with the decays after it.
        later = decays[1 : t + 1].flip(0).cumprod(0).flip(0)
        decayed = keys[: t + 1] * torch.cat((later, torch.ones_like(keys[:1])))
        scores = (decayed * queries[t]).sum(-1) / part.key_head_dim**0.5
        outputs.append((scores[..., None] * values[: t + 1]).sum(0))
    return gated_norm(weights, torch.stack(outputs), gates * torch.sigmoid(gates), eps)
