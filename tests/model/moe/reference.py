"""The MoE layer as a textbook writes it: every expert over every token, masks, drops by sorting lists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.config.sections.moe import MoEConfig

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Results that the layer must give on one whole micro-batch."""

    y: Tensor
    aux: Tensor
    z: Tensor
    dropped: frozenset[tuple[int, int, int]]
    """(position, sample, choice)."""


def make_weights(model: ModelConfig, seed: int = 0, bias: dict[int, float] | None = None) -> Weights:
    """Draw float64 weights by parameter name. The router adds `bias` where feature 0 of a token is 1."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, ffn = model.ffn.moe.num_experts, model.hidden_size, model.ffn.moe.intermediate_size
    shapes = {
        "router.weight": (experts, hidden),
        "experts.w_gate": (experts, hidden, ffn),
        "experts.w_up": (experts, hidden, ffn),
        "experts.w_down": (experts, ffn, hidden),
    }
    if model.ffn.moe.shared and model.ffn.moe.shared.gate:
        shapes["shared_gate"] = (1, hidden)
    weights = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    for expert, value in (bias or {}).items():
        weights["router.weight"][expert, 0] = value
    return weights


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gated = x @ gate
    return (gated / (1 + torch.exp(-gated)) * (x @ up)) @ down


def moe_reference(
    x: Tensor, weights: Weights, model: ModelConfig, moe: MoEConfig, chunks: Sequence[Sequence[int]] = ()
) -> Reference:
    """Apply the layer to [S, B, H]; `chunks` are the positions of each rank, for drops on a rank's own tokens."""
    logits = x @ weights["router.weight"].T
    scores = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., : model.ffn.moe.top_k]
    probs = scores.gather(-1, ids)
    if model.ffn.moe.router.softmax.kind == "post":
        probs = probs / probs.sum(-1, keepdim=True)
    dropped = frozenset(_drops(ids, probs, model, moe, chunks or [range(len(x))]))
    kept = torch.ones_like(probs)
    for index in dropped:
        kept[index] = 0.0
    y = torch.zeros_like(x)
    for expert in range(model.ffn.moe.num_experts):
        weight = (probs * kept * (ids == expert)).sum(-1, keepdim=True)
        y = y + weight * swiglu(x, *(weights[f"experts.{name}"][expert] for name in ("w_gate", "w_up", "w_down")))
    share = torch.stack([(ids == expert).sum().double() / ids.numel() for expert in range(model.ffn.moe.num_experts)])
    aux = model.ffn.moe.num_experts * sum(
        share[expert] * scores[..., expert].mean() for expert in range(model.ffn.moe.num_experts)
    )
    z = torch.log(torch.exp(logits).sum(-1)).square().mean()
    return Reference(y, aux, z, dropped)


def _drops(
    ids: Tensor, probs: Tensor, model: ModelConfig, moe: MoEConfig, chunks: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    if moe.capacity_factor == 0:
        return []
    length, batch, top_k = ids.shape
    dropped = []
    for positions in [range(length)] if moe.drop_scope.kind == "full_sequence" else chunks:
        capacity = max(1, math.ceil(len(positions) * batch * top_k / model.ffn.moe.num_experts * moe.capacity_factor))
        for expert in range(model.ffn.moe.num_experts):
            queue = [
                (s, b, k)
                for s in sorted(positions)
                for b in range(batch)
                for k in range(top_k)
                if ids[s, b, k] == expert
            ]
            if moe.drop_policy.kind == "probs":
                queue.sort(key=lambda index: -probs[index].item())
            dropped += queue[capacity:]
    return dropped
