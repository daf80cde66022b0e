"""Oracle of the SparseMixer router (arXiv:2409.12136), choice by choice of each token. See docs/routing.md.

No code is shared with the trainer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def noise_width(top_k: int, num_experts: int) -> int:
    """Return the uniform numbers of a token: for each choice, one for each expert and one for its weight."""
    return sum(num_experts + 1 for _ in range(top_k))


@dataclass(frozen=True)
class MixedChoices:
    """Choices of the tokens [B, S, K] and their weights."""

    experts: Tensor
    weights: Tensor


def sparse_mixer(logits: Tensor, top_k: int, noise: Tensor | None, jitter: float) -> MixedChoices:
    """Choose the experts of logits [B, S, E].

    Args:
        logits: float64.
        top_k: K.
        noise: uniform numbers [B, S, K * (E + 1)] in [0, 1), or None outside training.
        jitter: half the relative distance to the best logit up to which an expert takes part.
    """
    batch, length, _ = logits.shape
    experts = torch.zeros(batch, length, top_k, dtype=torch.int64)
    rows = []
    for b in range(batch):
        for s in range(length):
            chosen_ids, weights = _token(logits[b, s], top_k, jitter, None if noise is None else noise[b, s].tolist())
            experts[b, s] = torch.tensor(chosen_ids)
            rows.append(torch.stack(weights))
    return MixedChoices(experts, torch.stack(rows).view(batch, length, top_k))


def _token(logits: Tensor, top_k: int, jitter: float, noise: Sequence[float] | None) -> tuple[list[int], list[Tensor]]:
    values = logits.tolist()
    chosen_ids: list[int] = []
    weights = []
    for k in range(top_k):
        free = [e for e in range(len(values)) if e not in chosen_ids]
        best = max(free, key=lambda e: (values[e], -e))
        scale = {e: max(abs(values[e]), values[best]) for e in free}
        close = [e for e in free if not values[best] - values[e] > 2 * jitter * scale[e]]
        expert = best
        factor = 1.0
        if noise is not None:
            offset = k * (len(values) + 1)
            numbers = [2.0**-53 + (1 - 2.0**-52) * u for u in noise[offset : offset + len(values) + 1]]
            expert = max(close, key=lambda e: values[e] - math.log(-math.log(numbers[e])))
            factor = 1.0 if expert == best or numbers[-1] > 0.75 else 1 / 3
        exponentials = {e: (logits[e] - values[best]).exp() for e in close}
        weight = exponentials[expert] / torch.stack(list(exponentials.values())).sum()
        # The forward value is reduced, the gradient is not.
        weights.append(weight + (factor - 1) * weight.detach())
        chosen_ids.append(expert)
    return chosen_ids, weights
