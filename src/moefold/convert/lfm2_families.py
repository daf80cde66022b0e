"""Family LFM2-MoE: gated short convolutions and full attention. Torch-free."""

from moefold.convert.config_fields import (
    NUM_LAYERS,
    ConfigField,
    Constants,
    HeadSize,
    Renamed,
    num_experts,
    renamed,
)
from moefold.convert.family import (
    KEY_VALUE_HEADS,
    NUMBERED_PROJECTIONS,
    Family,
    by_attention,
    expert_layouts,
    ffn_rules,
    fused,
    layer_rules,
    layouts,
)
from moefold.convert.layer_fields import FirstKDense, LayerTypes
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import TensorBlock, TensorRule

_LFM2: tuple[ConfigField, ...] = (
    NUM_LAYERS,
    *renamed(
        hidden_size="hidden_size",
        num_attention_heads="attention.num_heads",
        vocab_size="vocab_size",
        norm_eps=("norm.eps", 1e-5),
    ),
    Renamed("tie_word_embeddings", "tie_embeddings", True, also=("tie_embedding",)),
    RopeParameters(1e6),
    KEY_VALUE_HEADS,
    HeadSize(),
    Constants({"attention.qk_norm": {}, "linear_attention": "short_convolution", "ffn.moe.router": "sigmoid"}),
    LayerTypes({"conv": "linear", "full_attention": "full"}),
    FirstKDense("num_dense_layers", default=2),
    num_experts("num_experts"),
    *renamed(
        initializer_range=("init_std", 0.02),
        conv_L_cache=("linear_attention.conv_kernel", 3),
        conv_bias=("linear_attention.bias", False),
        intermediate_size="ffn.dense.intermediate_size",
        num_experts_per_tok=("ffn.moe.top_k", 4),
        moe_intermediate_size="ffn.moe.intermediate_size",
        use_expert_bias=("ffn.moe.router.expert_bias", True),
        norm_topk_prob=("ffn.moe.router.normalize", True),
        routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.0),
    ),
)
_CONVOLUTION: dict[str, TensorRule] = {
    **fused(("attention.wb", "attention.wc", "attention.wv"), "conv.in_proj.weight"),
    **fused(("attention.bb", "attention.bc", "attention.bv"), "conv.in_proj.bias"),
    "layers.{l}.attention.conv": TensorBlock("model.layers.{l}.conv.conv.weight", dims=(0, 2)),
    **layer_rules(
        {
            "attention.wo": "conv.out_proj.weight",
            "attention.conv_bias": "conv.conv.bias",
            "attention.bo": "conv.out_proj.bias",
        }
    ),
}
_ATTENTION = layer_rules(
    {
        **{f"attention.w{name}": f"self_attn.{name}_proj.weight" for name in "qkv"},
        "attention.wo": "self_attn.out_proj.weight",
        "attention.query_norm.weight": "self_attn.q_layernorm.weight",
        "attention.key_norm.weight": "self_attn.k_layernorm.weight",
    }
)
_OTHERS: dict[str, TensorRule] = {
    "head.norm.weight": TensorBlock("model.embedding_norm.weight"),
    **ffn_rules("ffn", "feed_forward", NUMBERED_PROJECTIONS),
    **layer_rules(
        {
            "attention_norm.weight": "operator_norm.weight",
            "ffn_norm.weight": "ffn_norm.weight",
            "ffn.router.weight": "feed_forward.gate.weight",
            "ffn.router.expert_bias": "feed_forward.expert_bias",
        }
    ),
}

LFM2_FAMILIES = (
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2,
        layouts(
            by_attention(_CONVOLUTION, _ATTENTION),
            _OTHERS,
            experts=expert_layouts("feed_forward.experts", NUMBERED_PROJECTIONS),
        ),
        default_keys={"num_key_value_heads": 8},
    ),
)
"""Families in the order in which an export without --family tries them."""
