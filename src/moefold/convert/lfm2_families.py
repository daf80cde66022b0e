"""Family LFM2-MoE: gated short convolutions and full attention. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.config.patterns import ATTENTION_KINDS
from moefold.convert.config_fields import (
    ConfigField,
    Constant,
    HeadSize,
    KeyValueHeads,
    Renamed,
    WithAlias,
)
from moefold.convert.family import BACKBONE, Family, NumExperts, layer_rules, merge_rules
from moefold.convert.kda_families import ReshapedTensor
from moefold.convert.key_reader import Json
from moefold.convert.layer_fields import FirstKDense, letters_of, shorten_pattern
from moefold.convert.linear_families import by_attention
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import FusedRows, PerExpertTensors, RenamedTensor, StackedExperts, TensorRule


@dataclass(frozen=True)
class ConvolutionLayers:
    """`layer_types`, "conv" or "full_attention"."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern."""
        letters = letters_of(hf_config, "layer_types", {"conv": "L", "full_attention": "F"})
        return {"attention_pattern": shorten_pattern(letters, ATTENTION_KINDS)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer; windows read back as another model."""
        return {"layer_types": ["conv" if layer.attention.is_recurrent else "full_attention" for layer in model.layers]}


_LFM2: tuple[ConfigField, ...] = (
    Renamed("num_hidden_layers", "num_layers"),
    Renamed("hidden_size", "hidden_size"),
    Renamed("num_attention_heads", "num_attention_heads"),
    Renamed("vocab_size", "vocab_size"),
    Renamed("norm_eps", "norm_eps", 1e-5),
    WithAlias(Renamed("tie_word_embeddings", "tie_embeddings", True), "tie_word_embeddings", "tie_embedding"),
    Renamed("initializer_range", "init_std", 0.02),
    RopeParameters(1e6),
    KeyValueHeads(),
    HeadSize(),
    Constant("qk_norm", True),
    Constant("linear_attention", "short_convolution"),
    ConvolutionLayers(),
    Renamed("conv_L_cache", "linear_conv_kernel", 3),
    Renamed("conv_bias", "linear_conv_bias", False),
    FirstKDense("num_dense_layers", default=2),
    Renamed("intermediate_size", "ffn_hidden_size"),
    NumExperts("num_experts"),
    Renamed("num_experts_per_tok", "top_k", 4),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    Constant("router_score", "sigmoid"),
    Renamed("use_expert_bias", "expert_bias", True),
    Renamed("norm_topk_prob", "router_normalize", True),
    Renamed("routed_scaling_factor", "router_scaling_factor", 1.0),
)
_CONVOLUTION: dict[str, TensorRule] = {
    **{
        f"layers.{{l}}.attention.w{name}": FusedRows("model.layers.{l}.conv.in_proj.weight", part)
        for part, name in enumerate("bcv")
    },
    "layers.{l}.attention.conv": ReshapedTensor("model.layers.{l}.conv.conv.weight", 3, (0, 2)),
    **{
        f"layers.{{l}}.attention.b{name}": FusedRows("model.layers.{l}.conv.in_proj.bias", part)
        for part, name in enumerate("bcv")
    },
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
_FEED_FORWARD = layer_rules(
    {
        "attention_norm.weight": "operator_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        **{f"ffn.w_{ours}": f"feed_forward.{theirs}.weight" for ours, theirs in (("gate", "w1"), ("up", "w3"))},
        "ffn.w_down": "feed_forward.w2.weight",
        "ffn.router.weight": "feed_forward.gate.weight",
        "ffn.router.expert_bias": "feed_forward.expert_bias",
    }
)
_EXPERTS = "layers.{l}.ffn.experts.w_"
_PER_EXPERT: dict[str, TensorRule] = {
    f"{_EXPERTS}{ours}": PerExpertTensors(f"model.layers.{{l}}.feed_forward.experts.{{e}}.{theirs}.weight")
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_STACKED: dict[str, TensorRule] = {
    f"{_EXPERTS}gate": StackedExperts("model.layers.{l}.feed_forward.experts.gate_up_proj", 0),
    f"{_EXPERTS}up": StackedExperts("model.layers.{l}.feed_forward.experts.gate_up_proj", 1),
    f"{_EXPERTS}down": StackedExperts("model.layers.{l}.feed_forward.experts.down_proj"),
}


def _layout(experts: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    norm = {"head.norm.weight": RenamedTensor("model.embedding_norm.weight")}
    return merge_rules(BACKBONE, norm, by_attention(_CONVOLUTION, _ATTENTION), _FEED_FORWARD, experts)


LFM2_FAMILIES = (
    Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2,
        (_layout(_PER_EXPERT), _layout(_STACKED)),
        default_keys={"num_key_value_heads": 8},
    ),
)
"""Families in the order in which an export without --family tries them."""
