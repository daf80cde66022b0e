"""Family glm4v_moe (GLM-4.5V): the text model of a multimodal folder is GLM-4-MoE."""

from dataclasses import replace

from moefold.convert.config_fields import allowed
from moefold.convert.families import DECODER_FAMILIES
from moefold.convert.family import MultimodalFolder
from moefold.convert.family_files.qwen3_vl_moe import MROPE

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
    options={"head_dim": (20,), "rope_parameters": (MROPE | {"partial_rotary_factor": 0.5},)},
)
