"""Family aria_text, and the text model of Aria's folders: each expert as [in, out], gate before up. Torch-free."""

from moefold.convert.config_fields import SharedExperts, allowed, attention_bias, constants, renamed
from moefold.convert.family import (
    Example,
    Family,
    MultimodalFolder,
    attention_fields,
    layer_rules,
    layouts,
    untransposed_experts,
)

FAMILY = Family(
    "aria_text",
    "AriaTextForCausalLM",
    (
        *attention_fields(1e-6, 1e4),
        attention_bias(has_output=True),
        *allowed(mlp_bias=(False,)),
        *renamed(moe_num_experts=("num_experts", 8), moe_topk=("top_k", 2), intermediate_size="moe_ffn_hidden_size"),
        SharedExperts("moe_num_shared_experts", default=2, width_key="intermediate_size"),
        constants(layer_pattern="M", router_softmax="post"),
    ),
    layouts(
        layer_rules({"ffn.router.weight": "mlp.router.weight"}),
        experts=(
            untransposed_experts("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),
            untransposed_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
    ),
    multimodal=MultimodalFolder("aria", r"(vision_tower|multi_modal_projector)\..*", {"language_model.": ""}),
    example=Example(
        "AriaConfig",
        "AriaForConditionalGeneration",
        {"num_hidden_layers": 2},
        {
            "intermediate_size": (11, 12),
            "moe_num_experts": (7, 6),
            "moe_topk": (3, 2),
            "moe_num_shared_experts": (1, 2),
            "attention_bias": (True, False),
        },
        {
            "vision_config": {
                "model_type": "idefics3_vision",
                "hidden_size": 16,
                "intermediate_size": 20,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            }
        },
    ),
)
