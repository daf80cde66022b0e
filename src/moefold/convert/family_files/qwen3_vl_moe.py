"""Family qwen3_vl_moe (Qwen3-VL): the text model of a multimodal folder is Qwen3-MoE."""

from dataclasses import replace

from moefold.convert.config_fields import Constants, allowed
from moefold.convert.families import DECODER_FAMILIES
from moefold.convert.family import EXPERTS, MultimodalFolder, layouts, untransposed_experts

_QWEN3_MOE = DECODER_FAMILIES["qwen3_moe"]
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 1]}
"""RoPE of three axes for heads of 10 dims."""

FAMILY = replace(
    _QWEN3_MOE,
    name="qwen3_vl_moe_text",
    # The weights of chosen experts always sum to 1.
    config_fields=(
        *_QWEN3_MOE.config_fields,
        *allowed(norm_topk_prob=(True, None)),
        Constants({"ffn.moe.router.softmax": "post"}),
    ),
    layouts=layouts(
        experts=(untransposed_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), EXPERTS[1], EXPERTS[0])
    ),
    default_keys={"rope_theta": 5e5, "num_key_value_heads": 16},
    multimodal=MultimodalFolder("qwen3_vl_moe", r"model\.visual\..*", {"model.language_model.": "model."}),
    exported_as="qwen3_moe",
    options={"head_dim": (10,), "rope_parameters": (MROPE,)},
)
