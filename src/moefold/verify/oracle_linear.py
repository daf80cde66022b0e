"""Layers of kind L of the oracle: the recurrence token by token, each sample and document by itself."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.verify.no_formula import unknown_kind

DocumentFunction = Callable[[ModelConfig, Mapping[str, Tensor], str, Tensor], Tensor]
"""Returns a layer's output for the tokens of one document, [S, H]."""


def linear_attention(
    model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor, documents: Tensor
) -> Tensor:
    """Return the output of a layer of kind L for x [B, S, H].

    Gated DeltaNet: arXiv:2412.06464 eq. 10; Kimi Delta Attention: arXiv:2510.26692 eq. 1; gated linear attention:
    arXiv:2312.06635 eq. 3; short convolution: arXiv:2511.23404.

    Args:
        model: sizes and kind.
        weights: by name.
        name: of the layer's attention.
        x: normalised hidden states.
        documents: the document of each token, [B, S].
    """
    function: DocumentFunction
    match model.linear_attention:
        case "gla":
            function = _gla
        case "short_convolution":
            function = _short_convolution
        case "gated_deltanet":
            function = partial(_delta_rule, is_kda=False)
        case "kda":
            function = partial(_delta_rule, is_kda=True)
        case unknown:
            unknown_kind("model.linear_attention", unknown)
    rows = []
    for sample, numbers in zip(x, documents, strict=True):
        parts = [
            function(model, weights, name, sample[numbers == number]) for number in torch.unique_consecutive(numbers)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Return the causal convolution of the tokens of one document [S, C] with taps [C, K]."""
    total = torch.zeros_like(x)
    for distance in range(min(taps.shape[1], len(x))):
        shifted = torch.cat((torch.zeros_like(x[:distance]), x[: len(x) - distance]))
        total = total + shifted * taps[:, taps.shape[1] - 1 - distance]
    return total


def _gated_norm(model: ModelConfig, weights: Mapping[str, Tensor], name: str, out: Tensor, gates: Tensor) -> Tensor:
    """Return the projected output of heads [S, A, Dv], each normalised and multiplied by its gates."""
    normed = out / (out.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.norm.weight"]
    return (normed * gates).flatten(1) @ weights[f"{name}.wo"].T


def _short_convolution(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the layer's output for the tokens of one document, [S, H]."""
    before, after, values = (x @ weights[f"{name}.w{letter}"].T for letter in "bcv")
    if not model.linear_conv_bias:
        return (after * _convolve(before * values, weights[f"{name}.conv"])) @ weights[f"{name}.wo"].T
    before, after, values = (
        part + weights[f"{name}.b{letter}"] for part, letter in zip((before, after, values), "bcv", strict=True)
    )
    mixed = _convolve(before * values, weights[f"{name}.conv"]) + weights[f"{name}.conv_bias"]
    return (after * mixed) @ weights[f"{name}.wo"].T + weights[f"{name}.bo"]


def _gla(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return the layer's output for the tokens of one document, [S, H]."""
    heads = model.linear_num_value_heads
    repeats = heads // model.linear_num_key_heads
    queries, keys = (
        (x @ weights[f"{name}.w{letter}"].T).view(len(x), -1, model.linear_key_head_dim).repeat_interleave(repeats, 1)
        for letter in "qk"
    )
    values, gates = ((x @ weights[f"{name}.w{letter}"].T).view(len(x), heads, -1) for letter in "vg")
    logits = x @ weights[f"{name}.wa_down"].T @ weights[f"{name}.wa_up"].T + weights[f"{name}.ba"]
    decays = torch.sigmoid(logits).pow(1 / 16).view(len(x), heads, -1)
    found = []
    for t in range(len(x)):
        # Without a state: the keys of all tokens up to this one, each with the decays after it.
        later = decays[1 : t + 1].flip(0).cumprod(0).flip(0)
        decayed = keys[: t + 1] * torch.cat((later, torch.ones_like(keys[:1])))
        scores = (decayed * queries[t]).sum(-1) / model.linear_key_head_dim**0.5
        found.append((scores[..., None] * values[: t + 1]).sum(0))
    return _gated_norm(model, weights, name, torch.stack(found), gates * torch.sigmoid(gates))


def _delta_rule(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor, *, is_kda: bool) -> Tensor:
    """Return the output of Gated DeltaNet or Kimi Delta Attention for the tokens of one document, [S, H]."""
    value_heads = model.linear_num_value_heads
    repeats = value_heads // model.linear_num_key_heads

    def heads(letter: str, size: int) -> Tensor:
        mixed = _convolve(x @ weights[f"{name}.w{letter}"].T, weights[f"{name}.conv_{letter}"])
        return (mixed * torch.sigmoid(mixed)).view(len(x), -1, size)

    def unit(z: Tensor) -> Tensor:
        return (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1)

    key_dim = model.linear_key_head_dim
    queries = unit(heads("q", key_dim))
    keys = unit(heads("k", key_dim))
    values = heads("v", model.linear_value_head_dim)
    logits, gates = (
        x @ weights[f"{name}.w{letter}_down"].T @ weights[f"{name}.w{letter}_up"].T
        if is_kda and not model.linear_full_rank_gates
        else x @ weights[f"{name}.w{letter}"].T
        for letter in "ag"
    )
    gates = gates.view_as(values)
    gates = torch.sigmoid(gates) if is_kda else gates * torch.sigmoid(gates)
    logits = (logits + weights[f"{name}.dt_bias"]).view(len(x), value_heads, -1)
    rates = torch.exp(weights[f"{name}.a_log"])[:, None]
    # One decay of a head, or one of each key channel: [S, A, 1 or D].
    if model.linear_decay_bound:
        decays = torch.exp(model.linear_decay_bound / (1 + torch.exp(-rates * logits)))
    else:
        decays = torch.exp(-rates * torch.log1p(torch.exp(logits)))
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
    return _gated_norm(model, weights, name, torch.stack(found), gates)
