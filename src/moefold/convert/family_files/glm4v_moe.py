"""Family glm4v_moe (GLM-4.5V): the text model of a multimodal folder is GLM-4-MoE. Torch-free."""

from dataclasses import replace

from moefold.convert.config_fields import allowed
from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Example, MultimodalFolder

_GLM = DECODER_FAMILIES["glm4_moe"]

FAMILY = replace(
    _GLM,
    name="glm4v_moe_text",
    config_fields=(*_GLM.config_fields, *allowed(use_qk_norm=(False, None), num_nextn_predict_layers=(0, None))),
    default_keys={"num_key_value_heads": 8, "attention_bias": True, "num_nextn_predict_layers": 0},
    has_mtp=False,
    mtp_unreported=(),
    multimodal=MultimodalFolder("glm4v_moe", r"model\.visual\..*", {"model.language_model.": "model."}),
    exported_as="glm4_moe",
    example=Example(
        "Glm4vMoeConfig",
        "Glm4vMoeForConditionalGeneration",
        {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 1],
            },
        },
        {
            "intermediate_size": (19, 20),
            "moe_intermediate_size": (11, 12),
            "n_shared_experts": (1, 2),
            "n_group": (3, 2),
            "first_k_dense_replace": (1, 0),
            "norm_topk_prob": (True, False),
            "attention_bias": (True, False),
            "routed_scaling_factor": (2.5, 1.0),
        },
        {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2}},
    ),
)
