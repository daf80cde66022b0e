"""Family sarvam_mla (Sarvam-105B): DeepSeek-V3 with other defaults. Torch-free."""

from dataclasses import replace

from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Example

FAMILY = replace(
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
    example=Example(
        "SarvamMLAConfig",
        "DeepseekV3ForCausalLM",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": None,
            "qk_rope_head_dim": 6,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_group": 2,
            "num_hidden_layers": 2,
        },
        {
            "kv_lora_rank": (11, 8),
            "q_lora_rank": (None, 7),
            "qk_nope_head_dim": (3, 4),
            "v_head_dim": (5, 8),
            "intermediate_size": (19, 20),
            "moe_intermediate_size": (11, 12),
            "n_shared_experts": (1, 2),
            "n_group": (3, 2),
            "first_k_dense_replace": (1, 0),
            "norm_topk_prob": (True, False),
            "rope_interleave": (True, False),
            "routed_scaling_factor": (2.5, 1.0),
            "rope_parameters": (
                {"rope_type": "default", "rope_theta": 300.0},
                {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
                | {"mscale": 0.7, "mscale_all_dim": 0.9},
            ),
        },
    ),
)
