"""Family qwen3_omni_moe (Qwen3-Omni): the text model of the thinker is Qwen3-MoE."""

from dataclasses import replace

from moefold.convert.families import DECODER_FAMILIES
from moefold.convert.family import MultimodalFolder
from moefold.convert.family_files.qwen3_vl_moe import MROPE

FAMILY = replace(
    DECODER_FAMILIES["qwen3_moe"],
    name="qwen3_omni_moe_text",
    default_keys={"rope_theta": 1e6, "num_key_value_heads": 4, "norm_topk_prob": True},
    multimodal=MultimodalFolder(
        "qwen3_omni_moe",
        r"(talker|code2wav|audio_tower|visual)\..*",
        {"thinker.": ""},
        ("thinker_config", "text_config"),
    ),
    exported_as="qwen3_moe",
    options={"head_dim": (10,), "rope_parameters": (MROPE,)},
)
