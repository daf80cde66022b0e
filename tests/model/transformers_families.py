"""Small models of families in our words and as settings of transformers."""

from typing import Any

import torch
from torch import Tensor

SIZES = {
    "layers": 3,
    "hidden_size": 32,
    "attention.num_heads": 4,
    "attention.num_kv_heads": 2,
    "attention.head_dim": 8,
    "ffn.dense.intermediate_size": 48,
    "vocab_size": 64,
    "ffn.moe.num_experts": 8,
    "ffn.moe.top_k": 2,
    "ffn.moe.intermediate_size": 16,
    "rope.theta": 5000.0,
    "init_std": 0.3,
}
SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "mixtral": ({}, "Mixtral", {"intermediate_size": 16, "num_local_experts": 8}),
    "qwen3-moe": (
        {"attention.qk_norm": {}, "layers.ffn": "dense, 2 moe"},
        "Qwen3Moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen2-moe": (
        {
            "attention.qkv_bias": True,
            "ffn.moe.router.softmax": "pre",
            "ffn.moe.shared.intermediate_size": 24,
            "ffn.moe.shared.gate": True,
        },
        "Qwen2Moe",
        {
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "llama3": (
        {
            "layers.ffn": "dense",
            "rope.scaling": "llama3",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_seq_len": 32,
            "tie_embeddings": True,
        },
        "Llama",
        {
            "intermediate_size": 48,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def their_tensor(name: str, weights: dict[str, Tensor]) -> Tensor:
    """Our tensor for a name of transformers. Fails on a name that nothing answers."""
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        tied = "head.weight" if "head.weight" in weights else "embedding.weight"
        return weights[
            {"model.embed_tokens.weight": "embedding.weight", "model.norm.weight": "head.norm.weight"}.get(name, tied)
        ]
    _, _, layer, rest = name.split(".", 3)
    rest = rest.replace("block_sparse_moe.", "mlp.")
    simple = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_norm.weight": "attention.query_norm.weight",
        "self_attn.k_norm.weight": "attention.key_norm.weight",
        "mlp.gate.weight": "ffn.router.weight",
        "mlp.shared_expert_gate.weight": "ffn.shared_gate",
    }
    for letter in "qkvo":
        simple[f"self_attn.{letter}_proj.weight"] = f"attention.w{letter}"
        simple[f"self_attn.{letter}_proj.bias"] = f"attention.b{letter}"
    for kind in ("gate", "up", "down"):
        simple[f"mlp.{kind}_proj.weight"] = f"ffn.w_{kind}"
        simple[f"mlp.shared_expert.{kind}_proj.weight"] = f"ffn.shared.w_{kind}"
    prefix = f"layers.{layer}."
    if rest in simple:
        return weights[prefix + simple[rest]]
    experts = prefix + "ffn.experts."
    if rest == "mlp.experts.gate_up_proj":
        return torch.cat((weights[experts + "w_gate"].mT, weights[experts + "w_up"].mT), dim=1)
    assert rest == "mlp.experts.down_proj", name
    return weights[experts + "w_down"].mT
