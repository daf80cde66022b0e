"""Registry of the model families of Hugging Face folders, with Llama, Qwen, OLMoE, gpt-oss and DeepSeek."""

import pkgutil
from importlib import import_module
from operator import attrgetter

from moefold.convert.families import family_files
from moefold.convert.families.config_fields import (
    MTP_LAYERS,
    ConfigField,
    Constants,
    GatedSharedExpert,
    NormTopKProb,
    Renamed,
    RouterGroups,
    SharedExperts,
    allowed,
    attention_bias,
    num_experts,
    renamed,
)
from moefold.convert.families.family import (
    GATED_SHARED_EXPERT,
    MLA,
    MTP,
    Family,
    attention_fields,
    backbone_fields,
    fused,
    latent_fields,
    layer_rules,
    layouts,
    mixtral_layouts,
)
from moefold.convert.families.grouped_query_families import (
    LLAMA4_FAMILIES,
    PHI_FAMILIES,
    SIGMOID_FAMILIES,
    SOFTMAX_FAMILIES,
)
from moefold.convert.families.layer_fields import (
    FirstKDense,
    IndexerTypes,
    MlpLayerTypes,
    OneLayerType,
    SlidingWindowLayers,
    SparseLayers,
    UniformWindow,
)
from moefold.convert.families.linear_families import KDA_FAMILIES, LFM2_FAMILIES, QWEN_HYBRID_FAMILIES
from moefold.convert.families.longcat_families import LONGCAT_FAMILIES
from moefold.convert.families.rope_fields import RopeParameters

_GPT_OSS = {
    **layer_rules(
        {
            "attention.sinks": "self_attn.sinks",
            "ffn.router.weight": "mlp.router.weight",
            "ffn.router.bias": "mlp.router.bias",
            "ffn.experts.w_down": "mlp.experts.down_proj",
            "ffn.experts.b_down": "mlp.experts.down_proj_bias",
        }
    ),
    **fused(("ffn.experts.w_gate", "ffn.experts.w_up"), "mlp.experts.gate_up_proj", axis=-1, step=2),
    **fused(("ffn.experts.b_gate", "ffn.experts.b_up"), "mlp.experts.gate_up_proj_bias", axis=-1, step=2),
}
_NO_WINDOW: tuple[ConfigField, ...] = (
    *allowed(use_sliding_window=(False, None)),
    OneLayerType(void=("sliding_window", "max_window_layers")),
)
_QWEN_DENSE: tuple[ConfigField, ...] = (
    *_NO_WINDOW,
    Constants({"layers.ffn": "dense"}),
    *renamed(intermediate_size="ffn.dense.intermediate_size"),
)
_QWEN_EXPERTS: tuple[ConfigField, ...] = (
    *_NO_WINDOW,
    SparseLayers(),
    *renamed(
        intermediate_size="ffn.dense.intermediate_size",
        num_experts_per_tok="ffn.moe.top_k",
        moe_intermediate_size="ffn.moe.intermediate_size",
    ),
    NormTopKProb(default=False),
    num_experts("num_experts"),
)
_LATENT: tuple[ConfigField, ...] = (
    *latent_fields(),
    Constants({"attention": "mla"}),
    *renamed(
        intermediate_size="ffn.dense.intermediate_size",
        n_routed_experts="ffn.moe.num_experts",
        num_experts_per_tok="ffn.moe.top_k",
        moe_intermediate_size="ffn.moe.intermediate_size",
    ),
    SharedExperts(),
)
_DEEPSEEK: tuple[ConfigField, ...] = (
    *backbone_fields(1e-6, RopeParameters(1e4, scales_scores=True)),
    *_LATENT,
    FirstKDense(),
    *allowed(moe_layer_freq=(1,)),
)
_DEEPSEEK_V3_ROUTER: tuple[ConfigField, ...] = (
    RouterGroups(),
    *renamed(norm_topk_prob=("ffn.moe.router.normalize", True)),
    Constants({"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}),
    *allowed(scoring_func=("sigmoid",), topk_method=("noaux_tc",)),
    MTP_LAYERS,
)
_DEEPSEEK_V3_LAYOUTS = layouts(MLA, MTP)
_DEEPSEEK_V3_DEFAULTS = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
}
_INDEXER = layer_rules(
    {
        "attention.indexer.wq": "self_attn.indexer.wq_b.weight",
        "attention.indexer.wk": "self_attn.indexer.wk.weight",
        "attention.indexer.weights_proj": "self_attn.indexer.weights_proj.weight",
        "attention.indexer.key_norm.weight": "self_attn.indexer.k_norm.weight",
        "attention.indexer.key_norm.bias": "self_attn.indexer.k_norm.bias",
    }
)


def _sparse_attention(index_heads: int, *, is_interleaved: bool) -> tuple[ConfigField, ...]:
    """Return the fields of families with a lightning indexer, given the defaults of its heads and its RoPE."""
    return (
        *_LATENT,
        Renamed("q_lora_rank", "attention.q_lora_rank", minimum=1),
        MlpLayerTypes(default=3),
        *allowed(moe_layer_freq=(1,), rope_interleave=(True, None), mlp_bias=(False, None)),
        *renamed(routed_scaling_factor=("ffn.moe.router.scaling_factor", 2.5)),
        Constants({"rope.interleaved": True, "attention.indexer.rope_interleaved": is_interleaved}),
        *_DEEPSEEK_V3_ROUTER,
        OneLayerType("indexed_attention"),
        Renamed("index_topk", "attention.indexer.top_k", 2048, minimum=1),
        Renamed("index_n_heads", "attention.indexer.num_heads", index_heads, minimum=1),
        Renamed("index_head_dim", "attention.indexer.head_dim", 128, minimum=1),
    )


DECODER_FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            (
                *attention_fields(1e-6, 1e4),
                Constants({"layers.ffn": "dense"}),
                *renamed(intermediate_size="ffn.dense.intermediate_size"),
                attention_bias(has_output=True),
                *allowed(mlp_bias=(False,)),
            ),
            layouts(experts=({},)),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (*attention_fields(1e-6, 1e4), *_QWEN_DENSE, Constants({"attention.qkv_bias": True})),
            layouts(experts=({},)),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *attention_fields(1e-6, 1e4, head_size=128),
                *_QWEN_DENSE,
                attention_bias(has_output=True),
                Constants({"attention.qk_norm": {}}),
            ),
            layouts(experts=({},)),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            (
                *attention_fields(1e-5, 1e6),
                Constants({"ffn.moe.router.softmax": "post"}),
                num_experts("num_local_experts"),
                *renamed(num_experts_per_tok=("ffn.moe.top_k", 2), intermediate_size="ffn.moe.intermediate_size"),
                UniformWindow(),
            ),
            mixtral_layouts({"ffn.router.weight": "block_sparse_moe.gate.weight"}, {}),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            (
                *attention_fields(1e-6, 1e4),
                *_QWEN_EXPERTS,
                GatedSharedExpert(),
                *renamed(qkv_bias=("attention.qkv_bias", True)),
            ),
            layouts(GATED_SHARED_EXPERT),
            default_keys={"num_key_value_heads": 16},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (
                *attention_fields(1e-6, 1e4),
                *_QWEN_EXPERTS,
                attention_bias(has_output=True),
                Constants({"attention.qk_norm": {}}),
            ),
            layouts(),
            default_keys={"num_key_value_heads": 4},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            (
                *attention_fields(1e-5, 1e4),
                Constants({"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads"}),
                num_experts("num_experts"),
                *renamed(num_experts_per_tok="ffn.moe.top_k", intermediate_size="ffn.moe.intermediate_size"),
                NormTopKProb(default=False),
                attention_bias(has_output=True),
                *allowed(clip_qkv=(None,)),
            ),
            layouts(),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            (
                *attention_fields(1e-5, RopeParameters(1.5e5, is_required=True), head_size=64),
                SlidingWindowLayers(),
                num_experts("num_local_experts"),
                Renamed("num_experts_per_tok", "ffn.moe.top_k", also=("experts_per_token",)),
                *renamed(intermediate_size="ffn.moe.intermediate_size"),
                *allowed(attention_bias=(True,)),
                Constants(
                    {
                        "ffn.moe.router.softmax": "post",
                        "attention.qkv_bias": True,
                        "attention.output_bias": True,
                        "attention.sinks": True,
                        "ffn.moe.bias": True,
                        "ffn.moe.router.bias": True,
                        "ffn.moe.activation": "clamped_swiglu",
                    }
                ),
                *renamed(
                    swiglu_alpha=("ffn.moe.activation.alpha", 1.702), swiglu_limit=("ffn.moe.activation.limit", 7.0)
                ),
            ),
            layouts(_GPT_OSS, experts=({},)),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            (
                *_DEEPSEEK,
                *renamed(routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.0)),
                RouterGroups(has_method=True),
                Constants({"rope.interleaved": True, "ffn.moe.router.softmax": "pre"}),
                *allowed(norm_topk_prob=(False, None), scoring_func=("softmax",)),
            ),
            layouts(MLA),
            default_keys={"q_lora_rank": 1536, "n_shared_experts": 2},
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (
                *_DEEPSEEK,
                *renamed(
                    routed_scaling_factor=("ffn.moe.router.scaling_factor", 2.5),
                    rope_interleave=("rope.interleaved", True),
                ),
                *_DEEPSEEK_V3_ROUTER,
            ),
            _DEEPSEEK_V3_LAYOUTS,
            default_keys={**_DEEPSEEK_V3_DEFAULTS, "first_k_dense_replace": 3},
            has_mtp=True,
            mtp_unreported=(61,),
            aliases=("kimi_k2",),
        ),
        *KDA_FAMILIES,
        *QWEN_HYBRID_FAMILIES,
        *LFM2_FAMILIES,
        Family(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            (
                *backbone_fields(1e-5, RopeParameters(1e4, scales_scores=True)),
                *_LATENT,
                MlpLayerTypes(default=1),
                *renamed(
                    routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.8),
                    rope_interleave=("rope.interleaved", True),
                ),
                *_DEEPSEEK_V3_ROUTER,
            ),
            _DEEPSEEK_V3_LAYOUTS,
            default_keys={"num_key_value_heads": 20, "q_lora_rank": 768, "n_shared_experts": 1},
            has_mtp=True,
            mtp_unreported=(47,),
        ),
        Family(
            "deepseek_v32",
            "DeepseekV32ForCausalLM",
            (
                *backbone_fields(1e-6, RopeParameters(1e4, scales_scores=True)),
                *_sparse_attention(64, is_interleaved=False),
            ),
            layouts(MLA, MTP, _INDEXER),
            default_keys=_DEEPSEEK_V3_DEFAULTS,
            has_mtp=True,
            mtp_unreported=(61,),
        ),
        Family(
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            (
                *backbone_fields(1e-5, RopeParameters(1e4, scales_scores=True)),
                *_sparse_attention(32, is_interleaved=True),
                IndexerTypes(),
            ),
            layouts(MLA, MTP, _INDEXER),
            default_keys={"num_key_value_heads": 64, "q_lora_rank": 2048, "n_shared_experts": 1},
            has_mtp=True,
            mtp_unreported=(78,),
        ),
        *SOFTMAX_FAMILIES,
        *SIGMOID_FAMILIES,
        *LLAMA4_FAMILIES,
        *LONGCAT_FAMILIES,
        *PHI_FAMILIES,
    )
}
"""Decoder families by name, in the order of trial of an export without --family."""


_FILED = (
    family
    for module in pkgutil.iter_modules(family_files.__path__)
    for family in import_module(f"{family_files.__name__}.{module.name}").FAMILIES
)
FILED_FAMILIES: dict[str, Family] = {
    family.folder_type: family for family in sorted(_FILED, key=attrgetter("folder_type"))
}
"""Families of the files of `family_files`, by the `model_type` of their folders."""

FAMILIES = DECODER_FAMILIES | {family.name: family for family in FILED_FAMILIES.values() if not family.exported_as}
"""Families that an export may write, in the order of trial without --family."""

UNSUPPORTED_FAMILIES = {
    "deepseek_v4": "hyper-connections (several residual streams, mixed at each sublayer), attention over compressed "
    "keys with one key-value head and a grouped output projection, and experts chosen by a table of token ids",
    "granitemoehybrid": "Mamba layers",
    "nemotron_h": "Mamba layers",
    "doge": "a router that chooses over all tokens of a batch, so that a token depends on later ones, and experts that "
    "are rows of an embedding",
    "jetmoe": "experts that are heads of attention, to which tokens are dispatched",
    "unlimited_ocr": "attention to other keys in the prompt than while text is generated, so that no loss of a "
    "sequence is defined",
    "nllb-moe": "an encoder and a decoder",
    "switch_transformers": "an encoder and a decoder",
    "openai_privacy_filter": "attention to later tokens (a classifier of tokens)",
    "diffusion_gemma": "attention to later tokens of a block (text by diffusion)",
}
"""Families of mixture-of-experts models that are refused by name, with the parts that moefold lacks."""

MODEL_TYPES = {name: family for family in FAMILIES.values() for name in family.model_types}
MODEL_TYPES |= {
    name: family for family in FILED_FAMILIES.values() for name in family.model_types if name not in MODEL_TYPES
}
"""Families by each `model_type` that means them."""
