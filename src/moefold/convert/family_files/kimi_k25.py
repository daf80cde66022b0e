"""Family kimi_k25 (Kimi-K2.5): the text model of a multimodal folder is DeepSeek-V3. Torch-free."""

from dataclasses import replace

from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Example, MultimodalFolder

_DEEPSEEK_V3 = DECODER_FAMILIES["deepseek_v3"]

FAMILY = replace(
    _DEEPSEEK_V3,
    aliases=(),
    multimodal=MultimodalFolder(
        "kimi_k25",
        r"(model\.)?(vision_tower|mm_projector)\..*",
        # transformers 5.24 writes the layers of the text model as blocks, too.
        {"language_model.model.blocks.": "model.layers.", "language_model.": ""},
    ),
    exported_as="deepseek_v3",
    example=Example(
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        {
            "model_type": "deepseek_v3",
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": 6,
            "qk_rope_head_dim": 6,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_group": 2,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 0,
        },
        {
            "kv_lora_rank": (11, 8),
            "q_lora_rank": (7, 8),
            "qk_nope_head_dim": (3, 4),
            "v_head_dim": (5, 8),
            "intermediate_size": (19, 20),
            "moe_intermediate_size": (11, 12),
            "n_shared_experts": (1, 2),
            "n_group": (3, 2),
            "first_k_dense_replace": (1, 0),
            "routed_scaling_factor": (2.5, 1.0),
        },
        {
            "projection_hidden_size": 16,
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 24,
                "intermediate_size": 20,
                "num_attention_heads": 2,
            },
        },
    ),
)
