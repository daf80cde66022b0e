"""Grouped-query attention (arXiv:2305.13245 sec. 2.2) in float64, and the output gate of softmax attention."""

import math
from typing import Any

import torch
from torch import Tensor

from moefold.config.groups.attention import SoftmaxHeads, SoftmaxInput


def heads(part: Any, inputs: SoftmaxInput) -> SoftmaxHeads:
    """Return queries, keys and values of the heads."""
    weights = inputs.weights
    rotated_dims = round(part.head_dim * part.rope_fraction)

    def project(letter: str, count: int) -> Tensor:
        y = inputs.x @ weights[f"w{letter}"].T
        if part.qkv_bias:
            y = y + weights[f"b{letter}"]
        return y.view(*y.shape[:2], count, part.head_dim)

    def normalize(y: Tensor, name: str) -> Tensor:
        if not part.qk_norm or not (part.has_rope or part.qk_norm.in_nope):
            return y
        if part.qk_norm.over == "all_heads":
            return inputs.norm(y.flatten(2), weights[f"{name}.weight"]).view(y.shape)
        return inputs.norm(y, weights[f"{name}.weight"]) if part.qk_norm.weight else inputs.norm(y)

    def position(y: Tensor, name: str) -> Tensor:
        if part.qk_norm and part.qk_norm.after_rope:
            return normalize(inputs.rotate(y, rotated_dims), name)
        return inputs.rotate(normalize(y, name), rotated_dims)

    queries = position(project("q", part.num_heads), "query_norm")
    if part.temperature and not part.has_rope:
        steps = ((inputs.positions + 1) / part.temperature.tokens).floor()
        queries = queries * (1 + part.temperature.scale * torch.log(1 + steps))[:, :, None, None]
    return SoftmaxHeads(
        queries,
        position(project("k", part.num_kv_heads), "key_norm"),
        project("v", part.num_kv_heads),
        scale=part.scale or 1 / math.sqrt(part.head_dim),
        gates=gates(part, inputs),
        sinks=weights["sinks"] if part.sinks else None,
        bias=weights["bo"] if part.output_bias else None,
    )


def gates(part: Any, inputs: SoftmaxInput) -> Tensor | None:
    """Return the gates of the heads, [B, S, A, 1 or dims of a value head], or None without gates."""
    if part.gate is None:
        return None
    opened = 1 / (1 + torch.exp(-inputs.x @ inputs.weights["wg"].T))
    return opened[..., None] if part.gate.per == "head" else opened.unflatten(-1, (part.num_heads, -1))
