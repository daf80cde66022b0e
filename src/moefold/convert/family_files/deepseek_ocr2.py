"""Family deepseek_ocr2_text, and the text model of DeepSeek-OCR 2: DeepSeek-V2 with plain attention."""

from moefold.convert.config_fields import (
    Constants,
    HeadSize,
    RouterGroups,
    SharedExperts,
    allowed,
    attention_bias,
    renamed,
)
from moefold.convert.family import EXPERTS, KEY_VALUE_HEADS, Family, MultimodalFolder, backbone_fields, layouts
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
            intermediate_size="ffn.dense.intermediate_size",
            n_routed_experts="ffn.moe.num_experts",
            num_experts_per_tok="ffn.moe.top_k",
            moe_intermediate_size="ffn.moe.intermediate_size",
            routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.0),
        ),
        RouterGroups(has_method=True),
        SharedExperts(default=2),
        Constants({"ffn.moe.router.softmax": "pre"}),
    ),
    # That class only reads stacked experts.
    layouts(experts=EXPERTS[::-1]),
    multimodal=MultimodalFolder("deepseek_ocr2", r"model\.(qwen2_model|sam_model|projector)\..*|model\.view_seperator"),
    options={
        "hidden_size": (36,),
        "num_attention_heads": (6,),
        "num_key_value_heads": (2,),
        "head_dim": (None,),
        "mlp_layer_types": (["dense", "sparse"], ["sparse", "sparse"]),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
)
