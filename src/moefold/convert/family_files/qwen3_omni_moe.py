"""Family qwen3_omni_moe (Qwen3-Omni): the text model of the thinker is Qwen3-MoE. Torch-free."""

from dataclasses import replace

from moefold.convert.decoder_families import DECODER_FAMILIES
from moefold.convert.family import Example, MultimodalFolder
from moefold.convert.family_files.qwen3_vl_moe import MROPE, VISION

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
    example=Example(
        "Qwen3OmniMoeConfig",
        "Qwen3OmniMoeForConditionalGeneration",
        {"num_hidden_layers": 2, "num_experts_per_tok": 3, "head_dim": 10, "rope_parameters": MROPE},
        {
            "intermediate_size": (19, 20),
            "moe_intermediate_size": (11, 12),
            "num_experts": (7, 6),
            "mlp_only_layers": ([], [0]),
            "norm_topk_prob": (True, False),
            "attention_bias": (True, False),
        },
        {
            "enable_audio_output": False,
            "thinker_config": {
                "vision_config": VISION,
                "audio_config": {
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 16,
                    "d_model": 16,
                    "downsample_hidden_size": 8,
                    "num_mel_bins": 16,
                },
            },
        },
    ),
)
