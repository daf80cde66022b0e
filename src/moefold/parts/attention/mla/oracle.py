"""Multi-head latent attention (arXiv:2405.04434 eq. 37 to 47) in float64, head by head."""

import math
from typing import Any

import torch
from torch import Tensor

from moefold.config.groups.attention import SoftmaxHeads, SoftmaxInput
from moefold.parts.attention.gqa.oracle import gates


def heads(part: Any, inputs: SoftmaxInput) -> SoftmaxHeads:
    """Return queries and keys [B, S, A, nope + rope] and values [B, S, A, v] of the heads."""
    weights = inputs.weights
    nope_dim = part.qk_nope_head_dim
    rope_dim = part.qk_rope_head_dim
    rank = part.kv_lora_rank

    def rotate(y: Tensor) -> Tensor:
        return inputs.rotate(y[..., None, :], rope_dim)[:, :, 0]

    compressed = inputs.x
    if part.q_lora_rank:
        compressed = _latent(part, weights["query_norm.weight"], compressed @ weights["wq_down"].T, inputs.x)
    to_query = weights["wq_up" if part.q_lora_rank else "wq"]
    joint = inputs.x @ weights["wkv_down"].T
    latent = _latent(part, weights["key_value_norm.weight"], joint[..., :rank], inputs.x)
    shared = rotate(joint[..., rank:])
    queries = []
    keys = []
    values = []
    for head in range(part.num_heads):
        rows = to_query[head * (nope_dim + rope_dim) : (head + 1) * (nope_dim + rope_dim)]
        query = compressed @ rows.T
        queries.append(torch.cat((query[..., :nope_dim], rotate(query[..., nope_dim:])), -1))
        width = nope_dim + part.v_head_dim
        rows = weights["wkv_up"][head * width : (head + 1) * width]
        keys.append(torch.cat((latent @ rows[:nope_dim].T, shared), -1))
        values.append(latent @ rows[nope_dim:].T)
    return SoftmaxHeads(
        torch.stack(queries, 2),
        torch.stack(keys, 2),
        torch.stack(values, 2),
        scale=inputs.score_factor / math.sqrt(nope_dim + rope_dim),
        gates=gates(part, inputs),
        index_source=compressed,
    )


def _latent(part: Any, weight: Tensor, latent: Tensor, x: Tensor) -> Tensor:
    """Return a normalised latent [B, S, rank] of x [B, S, H]."""
    # DeepSeek's released code uses epsilon 1e-6 for these norms.
    normed = weight * latent / torch.sqrt(1e-6 + latent.square().mean(-1, keepdim=True))
    return normed * math.sqrt(x.shape[-1] / latent.shape[-1]) if part.scale_latents else normed
