"""Family sarvam_mla (Sarvam-105B): DeepSeek-V3 with other defaults."""

from dataclasses import replace

from moefold.convert.families import DECODER_FAMILIES

FAMILY = replace(
    DECODER_FAMILIES["deepseek_v3"],
    name="sarvam_mla",
    aliases=(),
    default_keys={
        "initializer_range": 0.006,
        "num_key_value_heads": None,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
)
