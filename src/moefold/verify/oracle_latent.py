"""The heads of multi-head latent attention for the oracle, one by one (arXiv:2405.04434 eq. 37 to 47)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.schema import ModelConfig
from moefold.verify.oracle_rotation import apply_rope, yarn_mscale


def mla_heads(model: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, S, A, nope + rope] and values [B, S, A, v] of [B, S, H]."""
    plain, turned, rank = model.qk_nope_head_dim, model.qk_rope_head_dim, model.kv_lora_rank

    def norm(latent: Tensor, which: str) -> Tensor:
        # DeepSeek's released code leaves the epsilon of these norms at 1e-6.
        size = latent.square().mean(-1, keepdim=True)
        return weights[f"{name}.{which}.weight"] * latent / torch.sqrt(1e-6 + size)

    if model.q_lora_rank:
        compressed = norm(torch.einsum("bsh,rh->bsr", x, weights[f"{name}.wq_down"]), "query_norm")
        to_query = weights[f"{name}.wq_up"]
    else:
        compressed, to_query = x, weights[f"{name}.wq"]
    joint = torch.einsum("bsh,rh->bsr", x, weights[f"{name}.wkv_down"])
    latent = norm(joint[..., :rank], "key_value_norm")
    shared = apply_rope(model, joint[..., None, rank:], turned)[:, :, 0]
    queries, keys, values = [], [], []
    for head in range(model.num_attention_heads):
        rows = to_query[head * (plain + turned) : (head + 1) * (plain + turned)]
        query = compressed @ rows.T
        queries.append(
            torch.cat((query[..., :plain], apply_rope(model, query[..., None, plain:], turned)[:, :, 0]), -1)
        )
        width = plain + model.v_head_dim
        rows = weights[f"{name}.wkv_up"][head * width : (head + 1) * width]
        keys.append(torch.cat((latent @ rows[:plain].T, shared), -1))
        values.append(latent @ rows[plain:].T)
    return torch.stack(queries, 2), torch.stack(keys, 2), torch.stack(values, 2)


def softmax_scale(model: ModelConfig) -> float:
    """What products of queries and keys are multiplied by."""
    scale = 1 / math.sqrt(model.head_size)
    if model.attention == "mla" and model.rope_scaling == "yarn" and model.rope_mscale_all_dim > 0:
        scale *= yarn_mscale(model.rope_scaling_factor, model.rope_mscale_all_dim) ** 2
    return scale
