"""Linear attention of the oracle: the recurrence token by token, each sample and document by itself."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.model import ModelConfig


def linear_attention(
    model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor, documents: Tensor
) -> Tensor:
    """Return Gated DeltaNet (arXiv:2412.06464 eq. 10) or Kimi Delta Attention (arXiv:2510.26692 eq. 1) of x [B, S, H].

    Args:
        model: sizes and kind.
        weights: by name.
        name: of the layer's attention.
        x: normalised hidden states.
        documents: the document of each token, [B, S].
    """
    rows = []
    for sample, numbers in zip(x, documents, strict=True):
        parts = [
            _of_document(model, weights, name, sample[numbers == number])
            for number in torch.unique_consecutive(numbers)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _of_document(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the layer's output for the tokens of one document, [S, H]."""
    value_heads = model.linear_num_value_heads
    repeats = value_heads // model.linear_num_key_heads

    def heads(letter: str, size: int) -> Tensor:
        projected = x @ weights[f"{name}.w{letter}"].T
        taps = weights[f"{name}.conv_{letter}"]
        total = torch.zeros_like(projected)
        for distance in range(min(model.linear_conv_kernel, len(x))):
            shifted = torch.cat((torch.zeros_like(projected[:distance]), projected[: len(x) - distance]))
            total = total + shifted * taps[:, model.linear_conv_kernel - 1 - distance]
        return (total * torch.sigmoid(total)).view(len(x), -1, size)

    def unit(z: Tensor) -> Tensor:
        return (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1)

    key_dim = model.linear_key_head_dim
    queries = unit(heads("q", key_dim))
    keys = unit(heads("k", key_dim))
    values = heads("v", model.linear_value_head_dim)
    is_kda = model.linear_attention == "kda"
    logits, gates = (
        x @ weights[f"{name}.w{letter}_down"].T @ weights[f"{name}.w{letter}_up"].T
        if is_kda
        else x @ weights[f"{name}.w{letter}"].T
        for letter in "ag"
    )
    gates = gates.view_as(values)
    gates = torch.sigmoid(gates) if is_kda else gates * torch.sigmoid(gates)
    steps = torch.log1p(torch.exp(logits + weights[f"{name}.dt_bias"])).view(len(x), value_heads, -1)
    # One decay of a head, or one of each key channel: [S, A, 1 or D].
    decays = torch.exp(-torch.exp(weights[f"{name}.a_log"])[:, None] * steps)
    strengths = torch.sigmoid(x @ weights[f"{name}.wb"].T)
    state = x.new_zeros(value_heads, model.linear_value_head_dim, key_dim)
    found = []
    for t in range(len(x)):
        # S_t = S_{t-1} diag(a) (I - b k k^T) + b v k^T, for all heads.
        strength = strengths[t, :, None, None]
        forget = torch.eye(key_dim, dtype=x.dtype) - strength * keys[t, :, :, None] * keys[t, :, None, :]
        written = strength * values[t, :, :, None] * keys[t, :, None, :]
        state = state * decays[t, :, None, :] @ forget + written
        found.append((state @ queries[t, :, :, None]).squeeze(-1) / key_dim**0.5)
    out = torch.stack(found)
    normed = out / (out.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.norm.weight"]
    return (normed * gates).flatten(1) @ weights[f"{name}.wo"].T
