"""Families of Sarvam: DeepSeek-V3 with other defaults (105B), and GLM-4-MoE with fused projections (30B)."""

from dataclasses import replace

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import allowed
from moefold.convert.families.families import DECODER_FAMILIES
from moefold.convert.families.family import grouped, layer_rules, layouts
from moefold.convert.families.tensor_mapping import TensorBlock

_GLM = DECODER_FAMILIES["glm4_moe"]


def _query_key_value(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return all queries, all keys and all values."""
    size = model.softmax_attention.head_dim
    return 1, (model.attention.num_heads * size, *(model.attention.num_kv_heads * size,) * 2)


FAMILIES = (
    replace(
        DECODER_FAMILIES["deepseek_v3"],
        name="sarvam_mla",
        aliases=(),
        default_keys={
            "initializer_range": 0.006,
            "num_key_value_heads": None,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    replace(
        _GLM,
        name="sarvam_moe",
        config_fields=(*_GLM.config_fields, *allowed(num_nextn_predict_layers=(0,))),
        layouts=layouts(
            {"embedding.weight": TensorBlock("model.word_embeddings.weight")},
            grouped([f"attention.w{x}" for x in "qkv"], "attention.query_key_value.weight", _query_key_value),
            grouped([f"attention.b{x}" for x in "qkv"], "attention.query_key_value.bias", _query_key_value, num_dims=1),
            layer_rules(
                {
                    "attention.wo": "attention.dense.weight",
                    "attention.query_norm.weight": "attention.query_layernorm.weight",
                    "attention.key_norm.weight": "attention.key_layernorm.weight",
                    "ffn.router.expert_bias": "mlp.gate.expert_bias",
                }
            ),
        ),
        default_keys={
            "initializer_range": 0.006,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "partial_rotary_factor": 1.0,
            "rope_theta": 8e6,
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
        has_mtp=False,
        mtp_unreported=(),
        renamed_modules={"attention": "self_attn", "dense": "o_proj"},
        options={"tie_word_embeddings": (False,)},
    ),
)
