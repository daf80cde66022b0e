"""Family aria_text, and the text model of Aria's folders: each expert as [in, out], gate before up."""

from moefold.convert.config_fields import Constants, SharedExperts, allowed, attention_bias, renamed
from moefold.convert.family import (
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
        *renamed(
            moe_num_experts=("ffn.moe.num_experts", 8),
            moe_topk=("ffn.moe.top_k", 2),
            intermediate_size="ffn.moe.intermediate_size",
        ),
        SharedExperts("moe_num_shared_experts", default=2, width_key="intermediate_size"),
        Constants({"ffn.moe.router.softmax": "post"}),
    ),
    layouts(
        layer_rules({"ffn.router.weight": "mlp.router.weight"}),
        experts=(
            untransposed_experts("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),
            untransposed_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
    ),
    multimodal=MultimodalFolder("aria", r"(vision_tower|multi_modal_projector)\..*", {"language_model.": ""}),
    options={"intermediate_size": (11, 12)},
)
