"""Registry of the model families of Hugging Face folders. Torch-free."""

from moefold.convert.config_fields import (
    AllowedValues,
    AttentionBias,
    ConfigField,
    Constant,
    GatedSharedExpert,
    LatentHeadSizes,
    MTPLayers,
    MultiHeadKeyValue,
    NormTopKProb,
    Positive,
    QueryLoraRank,
    Renamed,
    RouterGroups,
    SharedExperts,
    WithAlias,
)
from moefold.convert.family import (
    BACKBONE,
    BIASES,
    DENSE_FFN,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    MLA,
    MTP,
    PER_EXPERT,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    backbone_sizes,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.kda_families import KDA_FAMILIES
from moefold.convert.layer_fields import (
    FirstKDense,
    IndexedAttention,
    IndexerTypes,
    MlpLayerTypes,
    NoSlidingWindow,
    SlidingWindowLayers,
    SparseLayers,
    UniformLayers,
    UniformWindow,
)
from moefold.convert.lfm2_families import LFM2_FAMILIES
from moefold.convert.linear_families import QWEN_HYBRID_FAMILIES
from moefold.convert.llama4_families import LLAMA4_FAMILIES
from moefold.convert.longcat_families import LONGCAT_FAMILIES
from moefold.convert.phi_families import PHI_FAMILIES
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.sigmoid_families import SIGMOID_FAMILIES
from moefold.convert.softmax_families import SOFTMAX_FAMILIES
from moefold.convert.tensor_mapping import InterleavedTensor

_GPT_OSS = layer_rules(
    {
        "attention.bo": "self_attn.o_proj.bias",
        "attention.sinks": "self_attn.sinks",
        "ffn.router.weight": "mlp.router.weight",
        "ffn.router.bias": "mlp.router.bias",
        "ffn.experts.w_down": "mlp.experts.down_proj",
        "ffn.experts.b_down": "mlp.experts.down_proj_bias",
    }
)
_GPT_OSS |= {
    f"layers.{{l}}.ffn.experts.{ours}_{kind}": InterleavedTensor(f"model.layers.{{l}}.mlp.experts.{theirs}", part)
    for ours, theirs in (("w", "gate_up_proj"), ("b", "gate_up_proj_bias"))
    for part, kind in enumerate(("gate", "up"))
}


_NO_WINDOW: tuple[ConfigField, ...] = (AllowedValues("use_sliding_window", (False, None)), NoSlidingWindow())
_QWEN_EXPERTS: tuple[ConfigField, ...] = (
    SparseLayers(),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    NormTopKProb(default=False),
)


_LATENT: tuple[ConfigField, ...] = (
    MultiHeadKeyValue(),
    Constant("attention", "mla"),
    LatentHeadSizes(),
    QueryLoraRank(),
    Renamed("kv_lora_rank", "kv_lora_rank"),
    Renamed("qk_nope_head_dim", "qk_nope_head_dim"),
    Renamed("qk_rope_head_dim", "qk_rope_head_dim"),
    Renamed("v_head_dim", "v_head_dim"),
    AllowedValues("attention_bias", (False,)),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("n_routed_experts", "num_experts"),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    SharedExperts(),
)

_DEEPSEEK: tuple[ConfigField, ...] = (
    *backbone_sizes(1e-6, RopeParameters(1e4, scales_scores=True)),
    *_LATENT,
    FirstKDense(),
    AllowedValues("moe_layer_freq", (1,)),
)
_DEEPSEEK_V3_ROUTER: tuple[ConfigField, ...] = (
    RouterGroups(),
    Renamed("norm_topk_prob", "router_normalize", True),
    Constant("router_score", "sigmoid"),
    Constant("expert_bias", True),
    AllowedValues("scoring_func", ("sigmoid",)),
    AllowedValues("topk_method", ("noaux_tc",)),
    MTPLayers(),
)
_DEEPSEEK_V3_LAYOUTS = tuple(
    merge_rules(BACKBONE, MLA, MTP, SHARED_EXPERTS, ROUTER_BIAS, DENSE_FFN, ROUTER, experts)
    for experts in (PER_EXPERT, STACKED_EXPERTS)
)
_INDEXER = layer_rules(
    {
        "attention.indexer.wq": "self_attn.indexer.wq_b.weight",
        "attention.indexer.wk": "self_attn.indexer.wk.weight",
        "attention.indexer.weights_proj": "self_attn.indexer.weights_proj.weight",
        "attention.indexer.key_norm.weight": "self_attn.indexer.k_norm.weight",
        "attention.indexer.key_norm.bias": "self_attn.indexer.k_norm.bias",
    }
)


def _sparse_attention(index_heads: int) -> tuple[ConfigField, ...]:
    """Return the fields of families with a lightning indexer, given the default of its heads."""
    return (
        *_LATENT,
        Positive("q_lora_rank", "q_lora_rank"),
        MlpLayerTypes(default=3),
        AllowedValues("moe_layer_freq", (1,)),
        Renamed("routed_scaling_factor", "router_scaling_factor", 2.5),
        Constant("rope_interleaved", True),
        AllowedValues("rope_interleave", (True, None)),
        AllowedValues("mlp_bias", (False, None)),
        *_DEEPSEEK_V3_ROUTER,
        IndexedAttention(),
        Positive("index_topk", "index_topk", 2048),
        Positive("index_n_heads", "index_heads", index_heads),
        Positive("index_head_dim", "index_head_dim", 128),
    )


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            (
                *family_sizes(norm_eps=1e-6, rope_theta=1e4),
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                AttentionBias(has_output=True),
                AllowedValues("mlp_bias", (False,)),
            ),
            (merge_rules(BACKBONE, BIASES, DENSE_FFN),),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            (
                *family_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                Constant("qkv_bias", True),
            ),
            (merge_rules(BACKBONE, BIASES, DENSE_FFN),),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            (
                *family_sizes(norm_eps=1e-6, rope_theta=1e4, head_size=128),
                *_NO_WINDOW,
                UniformLayers("D"),
                Renamed("intermediate_size", "ffn_hidden_size"),
                AttentionBias(has_output=True),
                Constant("qk_norm", True),
            ),
            (merge_rules(BACKBONE, BIASES, HEAD_NORMS, DENSE_FFN),),
            default_keys={"num_key_value_heads": 32},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            (
                *family_sizes(norm_eps=1e-5, rope_theta=1e6),
                UniformLayers("M"),
                NumExperts("num_local_experts"),
                Renamed("num_experts_per_tok", "top_k", 2),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                Constant("router_softmax", "post"),
                UniformWindow(),
            ),
            (
                merge_rules(
                    BACKBONE, layer_rules({"ffn.router.weight": "block_sparse_moe.gate.weight"}), MIXTRAL_EXPERTS
                ),
                merge_rules(BACKBONE, ROUTER, STACKED_EXPERTS),
            ),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            (
                *family_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                *_QWEN_EXPERTS,
                NumExperts("num_experts"),
                GatedSharedExpert(),
                Renamed("qkv_bias", "qkv_bias", True),
            ),
            tuple(
                merge_rules(BACKBONE, BIASES, DENSE_FFN, ROUTER, SHARED_EXPERT, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"num_key_value_heads": 16},
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (
                *family_sizes(norm_eps=1e-6, rope_theta=1e4),
                *_NO_WINDOW,
                *_QWEN_EXPERTS,
                NumExperts("num_experts"),
                AttentionBias(has_output=True),
                Constant("qk_norm", True),
            ),
            tuple(
                merge_rules(BACKBONE, BIASES, HEAD_NORMS, DENSE_FFN, ROUTER, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"num_key_value_heads": 4},
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            (
                *family_sizes(norm_eps=1e-5, rope_theta=1e4),
                UniformLayers("M"),
                NumExperts("num_experts"),
                Renamed("num_experts_per_tok", "top_k"),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                NormTopKProb(default=False),
                AttentionBias(has_output=True),
                AllowedValues("clip_qkv", (None,)),
                Constant("qk_norm", True),
                Constant("qk_norm_width", "all_heads"),
            ),
            tuple(
                merge_rules(BACKBONE, BIASES, HEAD_NORMS, ROUTER, experts) for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            (
                *family_sizes(
                    norm_eps=1e-5, rope_theta=1.5e5, head_size=64, rope=RopeParameters(1.5e5, is_required=True)
                ),
                SlidingWindowLayers(),
                UniformLayers("M"),
                NumExperts("num_local_experts"),
                WithAlias(Renamed("num_experts_per_tok", "top_k"), "num_experts_per_tok", "experts_per_token"),
                Renamed("intermediate_size", "moe_ffn_hidden_size"),
                Constant("router_softmax", "post"),
                AllowedValues("attention_bias", (True,)),
                *(Constant(key, True) for key in ("qkv_bias", "attention_output_bias", "attention_sinks")),
                *(Constant(key, True) for key in ("moe_bias", "router_bias")),
                Constant("moe_activation", "clamped_swiglu"),
                Renamed("swiglu_alpha", "swiglu_alpha", 1.702),
                Renamed("swiglu_limit", "swiglu_limit", 7.0),
            ),
            (merge_rules(BACKBONE, BIASES, _GPT_OSS),),
            default_keys={"num_key_value_heads": 8},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            (
                *_DEEPSEEK,
                Renamed("routed_scaling_factor", "router_scaling_factor", 1.0),
                RouterGroups(has_method=True),
                Constant("rope_interleaved", True),
                Constant("router_softmax", "pre"),
                AllowedValues("norm_topk_prob", (False, None)),
                AllowedValues("scoring_func", ("softmax",)),
            ),
            tuple(
                merge_rules(BACKBONE, MLA, SHARED_EXPERTS, DENSE_FFN, ROUTER, experts)
                for experts in (PER_EXPERT, STACKED_EXPERTS)
            ),
            default_keys={"q_lora_rank": 1536, "n_shared_experts": 2},
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (
                *_DEEPSEEK,
                Renamed("routed_scaling_factor", "router_scaling_factor", 2.5),
                Renamed("rope_interleave", "rope_interleaved", True),
                *_DEEPSEEK_V3_ROUTER,
            ),
            _DEEPSEEK_V3_LAYOUTS,
            default_keys={
                "num_key_value_heads": 128,
                "q_lora_rank": 1536,
                "first_k_dense_replace": 3,
                "n_shared_experts": 1,
                "n_group": 8,
                "topk_group": 4,
            },
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
                *backbone_sizes(1e-5, RopeParameters(1e4, scales_scores=True)),
                *_LATENT,
                MlpLayerTypes(default=1),
                Renamed("routed_scaling_factor", "router_scaling_factor", 1.8),
                Renamed("rope_interleave", "rope_interleaved", True),
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
                *backbone_sizes(1e-6, RopeParameters(1e4, scales_scores=True)),
                *_sparse_attention(index_heads=64),
                Constant("index_rope_interleaved", False),
            ),
            tuple(merge_rules(layout, _INDEXER) for layout in _DEEPSEEK_V3_LAYOUTS),
            default_keys={
                "num_key_value_heads": 128,
                "q_lora_rank": 1536,
                "n_shared_experts": 1,
                "n_group": 8,
                "topk_group": 4,
            },
            has_mtp=True,
            mtp_unreported=(61,),
        ),
        Family(
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            (
                *backbone_sizes(1e-5, RopeParameters(1e4, scales_scores=True)),
                *_sparse_attention(index_heads=32),
                Constant("index_rope_interleaved", True),
                IndexerTypes(),
            ),
            tuple(merge_rules(layout, _INDEXER) for layout in _DEEPSEEK_V3_LAYOUTS),
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

UNSUPPORTED_FAMILIES = {
    "deepseek_v4": "hyper-connections (several residual streams, mixed at each sublayer), attention over compressed "
    "keys with one key-value head and a grouped output projection, and experts chosen by a table of token ids",
    "granitemoehybrid": "Mamba layers",
    "nemotron_h": "Mamba layers",
}
"""Families of mixture-of-experts models that are refused by name, with the parts that moefold does not have."""

MODEL_TYPES = {name: family for family in FAMILIES.values() for name in (family.name, *family.aliases)} | {
    family.multimodal.model_type: family for family in FAMILIES.values() if family.multimodal is not None
}
"""Every family by each `model_type` that means it."""
