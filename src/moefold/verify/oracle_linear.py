"""Linear attention of the oracle: the recurrence token by token, each sample and document by itself."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.model import ModelConfig


def gated_deltanet(
    model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor, documents: Tensor
) -> Tensor:
    """Return Gated DeltaNet (arXiv:2412.06464 eq. 10) of x [B, S, H], with the document of each token [B, S]."""
    rows = []
    for sample, numbers in zip(x, documents, strict=True):
        parts = [
            _gated_deltanet_of_document(model, weights, name, sample[numbers == number])
            for number in torch.unique_consecutive(numbers)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _gated_deltanet_of_document(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the layer's output for the tokens of one document, [S, H]."""
    value_heads = model.linear_num_value_heads
    repeats = value_heads // model.linear_num_key_heads

    def heads(letter: str, size: int) -> Tensor:
        projected = x @ weights[f"{name}.w{letter}"].T
        taps = weights[f"{name}.conv_{letter}"]
        mixed = []
        for t in range(len(x)):
            total = torch.zeros_like(projected[0])
            for distance in range(min(model.linear_conv_kernel, t + 1)):
                total = total + projected[t - distance] * taps[:, model.linear_conv_kernel - 1 - distance]
            mixed.append(total * torch.sigmoid(total))
        return torch.stack(mixed).view(len(x), -1, size)

    key_dim = model.linear_key_head_dim
    queries = heads("q", key_dim)
    keys = heads("k", key_dim)
    values = heads("v", model.linear_value_head_dim)
    gates = (x @ weights[f"{name}.wg"].T).view_as(values)
    steps = torch.log1p(torch.exp(x @ weights[f"{name}.wa"].T + weights[f"{name}.dt_bias"]))
    decays = torch.exp(-torch.exp(weights[f"{name}.a_log"]) * steps)
    strengths = torch.sigmoid(x @ weights[f"{name}.wb"].T)
    outputs = []
    for head in range(value_heads):
        state = x.new_zeros(model.linear_value_head_dim, key_dim)
        found = []
        for t in range(len(x)):
            query, key = (z[t, head // repeats] for z in (queries, keys))
            query, key = (z / (z @ z + 1e-6).sqrt() for z in (query, key))
            # S_t = S_{t-1} a (I - b k k^T) + b v k^T
            forget = torch.eye(key_dim, dtype=x.dtype) - strengths[t, head] * torch.outer(key, key)
            state = decays[t, head] * state @ forget + strengths[t, head] * torch.outer(values[t, head], key)
            found.append(state @ query / key_dim**0.5)
        out = torch.stack(found)
        normed = out / (out.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.norm.weight"]
        gate = gates[:, head]
        outputs.append(normed * gate * torch.sigmoid(gate))
    return torch.cat(outputs, -1) @ weights[f"{name}.wo"].T
