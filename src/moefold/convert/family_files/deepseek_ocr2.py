"""Family deepseek_ocr2_text, and the text model of DeepSeek-OCR 2: DeepSeek-V2 with plain attention. Torch-free."""

from moefold.convert.config_fields import (
    HeadSize,
    RouterGroups,
    SharedExperts,
    allowed,
    attention_bias,
    constants,
    renamed,
)
from moefold.convert.family import EXPERTS, KEY_VALUE_HEADS, Example, Family, MultimodalFolder, backbone_fields, layouts
from moefold.convert.layer_fields import MlpLayerTypes

FAMILY = Family(
    "deepseek_ocr2_text",
    # transformers has no class of the text model with a head.
    "DeepseekOcr2TextModel",
    (
        *backbone_fields(1e-6, 1e4),
        KEY_VALUE_HEADS,
        HeadSize(is_derived=True),
        attention_bias(has_output=True),
        MlpLayerTypes(default=0),
        *allowed(mlp_bias=(False,), norm_topk_prob=(False, None), scoring_func=("softmax", None)),
        *renamed(
            intermediate_size="ffn_hidden_size",
            n_routed_experts="num_experts",
            num_experts_per_tok="top_k",
            moe_intermediate_size="moe_ffn_hidden_size",
            routed_scaling_factor=("router_scaling_factor", 1.0),
        ),
        RouterGroups(has_method=True),
        SharedExperts(default=2),
        constants(router_softmax="pre"),
    ),
    # That class reads stacked experts alone.
    layouts(experts=EXPERTS[::-1]),
    multimodal=MultimodalFolder("deepseek_ocr2", r"model\.(qwen2_model|sam_model|projector)\..*|model\.view_seperator"),
    example=Example(
        "DeepseekOcr2Config",
        "DeepseekOcr2ForConditionalGeneration",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 36,
            "head_dim": None,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        {
            "intermediate_size": (19, 20),
            "moe_intermediate_size": (11, 12),
            "n_shared_experts": (1, 2),
            "mlp_layer_types": (["dense", "sparse"], ["sparse", "sparse"]),
            "topk_method": ("greedy", "group_limited_greedy"),
            "routed_scaling_factor": (2.5, 1.0),
        },
        {
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "output_channels": 8,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "global_attn_indexes": [0],
                    "downsample_channels": [8, 16],
                    "image_size": 64,
                },
                "encoder_config": {
                    "hidden_size": 16,
                    "intermediate_size": 20,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "vocab_size": 10,
                },
            }
        },
    ),
)
