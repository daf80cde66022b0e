"""Small random models of every family, made by transformers, as folders on disk."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.convert.families.families import FILED_FAMILIES
from moefold.convert.families.family import Family
from moefold.convert.families.known_keys import declared_keys

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")
CONFIG_MAPPING = transformers.CONFIG_MAPPING

SIZES = {
    "vocab_size": 66,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN_EXPERTS = {"intermediate_size": 20, "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 36, "rope_parameters": LLAMA3, "head_dim": 8}),
    "llama-tied": ("Llama", {"intermediate_size": 36, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"intermediate_size": 36, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"intermediate_size": 36, "head_dim": 10}),
    "mixtral": ("Mixtral", {"intermediate_size": 20, "num_local_experts": 6, "head_dim": 8}),
    "mixtral-tied": ("Mixtral", {"intermediate_size": 20, "num_local_experts": 6, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    "qwen2-moe-normed": (
        "Qwen2Moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 4, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 6}),
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 11,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
EVEN = {"kv_lora_rank": 10, "qk_nope_head_dim": 4}
"""The complex rotation that transformers has for DeepSeek-V2 wants even strides."""
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 3.0}
MODELS |= {
    "gpt-oss": (
        "GptOss",
        {
            "intermediate_size": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "sliding_window": 7,
            "swiglu_limit": 2.0,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 12, "num_experts": 7, "num_experts_per_tok": 3}),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, **EVEN, "rope_parameters": YARN | MSCALE, "routed_scaling_factor": 3.7, "topk_method": "greedy"},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**LATENT, **EVEN, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "rope_parameters": YARN, "n_group": 3, "topk_group": 2}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False},
    ),
}
GLM = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
GRANITE = {
    "intermediate_size": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LONGCAT = {
    # The scaled latents sharpen attention, which amplifies rounding.
    "initializer_range": 0.2,
    # Each of two layers has two attentions.
    "num_hidden_layers": 4,
    "num_layers": 2,
    "num_key_value_heads": 6,
    "ffn_hidden_size": 20,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 5,
    "moe_topk": 3,
    "kv_lora_rank": 11,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 5,
    "routed_scaling_factor": 1.7,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
NO_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
BAILING = {
    **{key: value for key, value in LATENT.items() if key != "n_routed_experts"},
    **NO_TOKENS,
    "initializer_range": 0.1,
    "num_local_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "head_dim": 5,
    "short_conv_kernel_size": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "kda_lower_bound": -3.0,
    "num_mtp_layers": 0,
}
NEWER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": (
        "Glm4Moe",
        {
            **GLM,
            "head_dim": 8,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
            "num_mtp_layers": 0,
        },
    ),
    "glm4-moe-plain": ("Glm4Moe", {**GLM, "head_dim": 16, "norm_topk_prob": False, "num_mtp_layers": 0}),
    "dots1": (
        "Dots1",
        {**GLM, "head_dim": 8, "attention_bias": True, "layer_types": WINDOWS, "sliding_window": 5},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": YARN | MSCALE,
        },
    ),
    "hy-v3": (
        "HYV3",
        {
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "head_dim": 8,
            "attention_bias": True,
            "router_scaling_factor": 1.7,
        },
    ),
    "solar-open": (
        "SolarOpen",
        {**GLM, "head_dim": 8, "attention_bias": True, "rope_parameters": ROPE, "first_k_dense_replace": 0},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "intermediate_size": 12,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "head_dim": 8,
            "pad_token_id": None,
        },
    ),
    "ernie4-5-moe-interval": (
        "Ernie4_5_Moe",
        {
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "granite-moe": ("GraniteMoe", {**GRANITE, "attention_bias": True}),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 10}),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {
            "intermediate_size": 12,
            "num_experts": 7,
            "moe_topk": 3,
            "head_dim": 8,
            "attention_bias": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 9.0, "factor": 1.0},
        },
    ),
    "flex-olmo": (
        "FlexOlmo",
        {"intermediate_size": 12, "num_experts": 7, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "layer_types": WINDOWS,
            "sliding_window": 5,
            "pad_token_id": None,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "intermediate_size": 20,
            "moe_intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "head_dim": 8,
            "layer_types": WINDOWS,
            "sliding_window": 5,
            "mup_enabled": True,
            "route_scale": 1.7,
            "attention_bias": True,
        },
    ),
    "llama4": (
        "Llama4Text Llama4",
        {
            "num_hidden_layers": 4,
            "intermediate_size": 12,
            "intermediate_size_mlp": 20,
            "num_local_experts": 5,
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 5,
            "attention_bias": True,
            "floor_scale": 3,
            "attn_scale": 0.7,
            "rope_parameters": LLAMA3,
        },
    ),
    "longcat-flash": (
        "LongcatFlash",
        {
            **LONGCAT,
            "zero_expert_num": 0,
            "rope_parameters": YARN | MSCALE,
        },
    ),
    "llama4-plain": (
        "Llama4Text Llama4",
        {
            "intermediate_size": 12,
            "intermediate_size_mlp": 20,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 1, 0],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "attention_chunk_size": 3,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **QWEN_EXPERTS,
            # The recurrence is computed in float32 even in a float64 model, and wider weights amplify its rounding.
            "initializer_range": 0.1,
            "shared_expert_intermediate_size": 10,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [2],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
            "initializer_range": 0.1,
            "q_lora_rank": None,
            "num_local_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeText Qwen3_5Moe",
        {
            **{key: value for key, value in QWEN_EXPERTS.items() if key != "intermediate_size"},
            "initializer_range": 0.1,
            "shared_expert_intermediate_size": 10,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 5,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **QWEN_EXPERTS,
            "initializer_range": 0.1,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": True,
            **NO_TOKENS,
        },
    ),
    "lfm2-moe-plain": (
        "Lfm2Moe",
        {
            **QWEN_EXPERTS,
            "initializer_range": 0.1,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "use_expert_bias": False,
            "conv_L_cache": 4,
            "conv_bias": True,
            **NO_TOKENS,
        },
    ),
    "bailing-hybrid": ("BailingHybrid", BAILING),
    "bailing-hybrid-plain": (
        "BailingHybrid",
        {
            **BAILING,
            "q_lora_rank": None,
            "kda_safe_gate": False,
            "norm_topk_prob": False,
            "layer_types": None,
            "layer_group_size": 2,
            "first_k_dense_replace": 0,
            "rope_parameters": YARN | MSCALE,
        },
    ),
    "qwen3-next-equal-heads": (
        "Qwen3Next",
        {
            **QWEN_EXPERTS,
            "initializer_range": 0.1,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 10,
            "head_dim": 16,
            "norm_topk_prob": False,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
            "tie_word_embeddings": True,
        },
    ),
}
PHI_MOE = {"intermediate_size": 12, "num_local_experts": 5, "eos_token_id": None, "bos_token_id": None}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 96,
}
NEWER_MODELS |= {
    "phi-moe": (
        "Phimoe",
        {
            **PHI_MOE,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 7,
            # Several experts are close to the best one.
            "router_jitter_noise": 0.4,
            "rope_parameters": LONGROPE,
        },
    ),
    "phi-moe-plain": ("Phimoe", {**PHI_MOE, "head_dim": 8, "tie_word_embeddings": True}),
}
SPARSE = {
    **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_group": 3,
    "topk_group": 2,
    "index_topk": 5,
    # With few heads many scores are 0, and equal ones have no order in transformers.
    "index_n_heads": 16,
    "index_head_dim": 10,
    "bos_token_id": None,
    "eos_token_id": None,
}
NEWER_MODELS |= {
    "deepseek-v32": ("DeepseekV32", {**SPARSE, "rope_parameters": YARN | MSCALE}),
    # Every second layer from the third on shares the selection of the one before it.
    "glm-moe-dsa": (
        "GlmMoeDsa",
        {**SPARSE, "norm_topk_prob": False, "tie_word_embeddings": True, "index_topk_freq": 2},
    ),
}


USUAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2,),
    "intermediate_size": (19, 20),
    "moe_intermediate_size": (11, 12),
    "shared_expert_intermediate_size": (9, 10),
    "num_experts": (7, 6),
    "moe_num_experts": (7, 6),
    "n_routed_experts": (12,),
    "num_experts_per_tok": (3,),
    "moe_topk": (3, 2),
    "moe_k": (3, 2),
    "n_shared_experts": (2, 1),
    "moe_num_shared_experts": (2, 1),
    "n_group": (3, 2),
    "topk_group": (2,),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (2.5, 1.0),
    "attention_bias": (True, False),
    "use_qk_norm": (True, False),
    "first_k_dense_replace": (1, 0),
    "mlp_only_layers": ([], [0]),
    "sliding_window": (5, 2),
    "linear_num_key_heads": (3, 2),
    "linear_num_value_heads": (6,),
    "linear_key_head_dim": (5, 8),
    "linear_value_head_dim": (7, 4),
    "linear_conv_kernel_dim": (4, 2),
}
LATENT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_attention_heads": (6,),
    "num_key_value_heads": (6,),
    "head_dim": (6,),
    "qk_rope_head_dim": (6,),
    "kv_lora_rank": (11, 8),
    "q_lora_rank": (None, 7),
    "qk_nope_head_dim": (3, 4),
    "v_head_dim": (5, 8),
    "rope_interleave": (True, False),
    "attention_bias": (False,),
    "rope_parameters": (ROPE, YARN | MSCALE),
}
SMALL = {
    "depth": 1,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "hidden_size": 16,
    "d_model": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "num_mel_bins": 16,
    "output_channels": 8,
    "downsample_channels": [8, 16],
    "global_attn_indexes": [0],
    "downsample_hidden_size": 8,
    "vocab_size": 10,
    "image_size": 56,
    "patch_size": 14,
    "projection_hidden_size": 16,
    "enable_audio_output": False,
}
"""Sizes of vision and audio models, by the keys that their configuration classes declare."""


def options_of(family: Family) -> dict[str, tuple[Any, ...]]:
    """The values of each key; a model of a family's file takes one of them."""
    declared = declared_keys().families[family.name]
    usual = {key: values for key, values in USUAL_OPTIONS.items() if key in declared}
    usual |= LATENT_OPTIONS if "kv_lora_rank" in declared else {}
    return {key: (value,) for key, value in NO_TOKENS.items()} | usual | dict(family.options)


def first_sizes(family: Family) -> dict[str, Any]:
    """The first value of each option."""
    return {key: values[0] for key, values in options_of(family).items()}


def multimodal_config(family: Family, sizes: Mapping[str, Any], how: Mapping[str, Any]) -> Any:
    """The configuration of a whole multimodal model with small other models, given the text model's sizes."""
    kind = CONFIG_MAPPING[family.multimodal.model_type]
    return kind(**_small(kind, family.multimodal.config_path, dict(sizes)), **how)


def _small(kind: Any, path: tuple[str, ...], text: dict[str, Any]) -> dict[str, Any]:
    """Small sizes of a configuration class and of those inside of it, with the text model's at the end of a path."""
    found: dict[str, Any] = {key: value for key, value in SMALL.items() if key in kind.__dataclass_fields__}
    for key, inner in kind.sub_configs.items():
        if path == (key,):
            found |= {key: text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
        elif inner is transformers.AutoConfig:
            model_type = kind.sub_configs_defaults[key].model_type
            found[key] = _small(type(transformers.AutoConfig.for_model(model_type)), (), {}) | {
                "model_type": model_type
            }
        else:
            found[key] = _small(inner, path[1:] if path[:1] == (key,) else (), text)
    return found


MODEL_NAMES = tuple(MODELS)
FILED = {name.replace("_", "-"): family for name, family in FILED_FAMILIES.items()}
"""Families whose sizes are in the file of the family."""
NEWER_MODELS |= {
    name: (f"{CONFIG_MAPPING[family.name].__name__[:-6]} {family.architecture[:-11]}", first_sizes(family))
    for name, family in FILED.items()
    if not family.multimodal
}
MODELS |= NEWER_MODELS
MODELS["longcat-flash-zero"] = ("LongcatFlash", {**LONGCAT, "zero_expert_num": 3, "rope_parameters": ROPE})
"""Not among those whose export transformers loads: it expects tensors of the experts without computation."""
ALL_MODELS = (*MODEL_NAMES, *NEWER_MODELS)
_FIRST_OF_CLASS = {MODELS[name][0]: name for name in reversed(ALL_MODELS)}.values()


def _fast(names: Iterable[str]) -> tuple[Any, ...]:
    """All models; only the first model of a class is a fast row, if it is among some names."""
    fast = {*names} & {*_FIRST_OF_CLASS}
    return tuple(name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in ALL_MODELS)


ONE_FOR_EACH_RULE = _fast(
    (
        *("mixtral", "gpt-oss", "deepseek-v3", "granite-moe", "ernie4-5-moe", "llama4", "longcat-flash", "qwen3-next"),
        *("kimi-linear", "lfm2-moe", "sarvam-moe", "phi-moe"),
    )
)
"""For tests of folders in both directions: a fast row for each kind of rule of tensors, and each layout of experts.
`test_weight_sources` and `test_family_files` read the weights of every family; a mapping has each tensor once."""
ALL_MODELS_SOME_SLOW = _fast(MODEL_NAMES)
"""For tests of code that does not depend on the family."""


EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def config_of(name: str, **sizes: Any) -> Any:
    """Return the configuration of transformers of a model of `MODELS`."""
    kind, more = MODELS[name]
    return getattr(transformers, f"{kind.partition(' ')[0]}Config")(**{**SIZES, **more, **sizes}, **EAGER)


def make_model(name: str, **sizes: Any) -> Any:
    """Return a random model of transformers. No norm is 1 and no bias 0. A multimodal model of `FILED` is whole."""
    torch.manual_seed(len(name))
    if name in MODELS:
        config_kind, _, class_kind = MODELS[name][0].partition(" ")
        config = config_of(name, **sizes)
        model = getattr(transformers, f"{class_kind or config_kind}ForCausalLM")(config).eval()
    else:
        config = multimodal_config(FILED[name], {**SIZES, **first_sizes(FILED[name]), **sizes}, EAGER)
        model = transformers.AutoModelForMultimodalLM.from_config(config).eval()
    if hasattr(model, "thinker"):
        model.forward = model.thinker.forward
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("_bias"):
                parameter += 0.1 * torch.randn(parameter.shape)
            elif any(part in parameter_name for part in (".experts.", "gate.weight", "router.", "wg.weight")):
                parameter.normal_(0.0, 0.3)
        for buffer_name, buffer in (*model.named_buffers(), *model.named_parameters()):
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1)
    return model


def save_model(model: Any, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """Save as transformers does, and give the model the rounded weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    # A copy: a model turned to bfloat16 and back has lost the precision of its rotary frequencies.
    copy.deepcopy(model).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of transformers."""
    with torch.no_grad():
        return model(input_ids=tokens).logits


def tokens_of(count: int, length: int, vocab_size: int = 66) -> torch.Tensor:
    """int64 [count, length], the same every time."""
    return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(7))
