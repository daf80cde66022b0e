"""Gated DeltaNet (arXiv:2412.06464 eq. 10) token by token in float64, with functions that other recurrences share."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.groups.linear_attention import DeltaRulePart


def output(part: DeltaRulePart, weights: Mapping[str, Tensor], x: Tensor, eps: float) -> Tensor:
    """Return the output for the tokens of one document, [S, H]."""
    logits = (x @ weights["wa"].T + weights["dt_bias"])[..., None]
    decays = torch.exp(-torch.exp(weights["a_log"])[:, None] * torch.log1p(torch.exp(logits)))
    gates = x @ weights["wg"].T
    return delta_rule(part, weights, x, (decays, gates * torch.sigmoid(gates)), eps)


def delta_rule(
    part: DeltaRulePart, weights: Mapping[str, Tensor], x: Tensor, gates: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Return the output of a delta rule for the tokens of one document, [S, H].

    Args:
        gates: decays [S, A, 1 or D], and factors of the output [S, A * Dv].
    """
    decays, factors = gates
    repeats = part.num_value_heads // part.num_key_heads
    key_dim = part.key_head_dim

    def heads(letter: str, size: int) -> Tensor:
        mixed = convolve(x @ weights[f"w{letter}"].T, weights[f"conv_{letter}"])
        return (mixed * torch.sigmoid(mixed)).view(len(x), -1, size)

    def unit(z: Tensor) -> Tensor:
        return (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1)

    queries = unit(heads("q", key_dim))
    keys = unit(heads("k", key_dim))
    values = heads("v", part.value_head_dim)
    strengths = torch.sigmoid(x @ weights["wb"].T)
    state = x.new_zeros(part.num_value_heads, part.value_head_dim, key_dim)
    outputs = []
    for t in range(len(x)):
        # S_t = S_{t-1} diag(a) (I - b k k^T) + b v k^T, for all heads.
        strength = strengths[t, :, None, None]
        forget = torch.eye(key_dim, dtype=x.dtype) - strength * keys[t, :, :, None] * keys[t, :, None, :]
        written = strength * values[t, :, :, None] * keys[t, :, None, :]
        state = state * decays[t, :, None, :] @ forget + written
        outputs.append((state @ queries[t, :, :, None]).squeeze(-1) / key_dim**0.5)
    return gated_norm(weights, torch.stack(outputs), factors.view_as(values), eps)


def gated_norm(weights: Mapping[str, Tensor], out: Tensor, gates: Tensor, eps: float) -> Tensor:
    """Return the projected output of heads [S, A, Dv], each normalised and multiplied by its gates."""
    normed = out / (out.square().mean(-1, keepdim=True) + eps).sqrt() * weights["norm.weight"]
    return (normed * gates).flatten(1) @ weights["wo"].T


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Return the causal convolution of the tokens of one document [S, C] with taps [C, K]."""
    total = torch.zeros_like(x)
    for distance in range(min(taps.shape[1], len(x))):
        shifted = torch.cat((torch.zeros_like(x[:distance]), x[: len(x) - distance]))
        total = total + shifted * taps[:, taps.shape[1] - 1 - distance]
    return total
