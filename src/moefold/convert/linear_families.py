"""Hybrid families of Qwen, with Gated DeltaNet. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.config_fields import (
    ConfigField,
    Constants,
    GatedSharedExpert,
    NormTopKProb,
    Renamed,
    allowed,
    num_experts,
    renamed,
)
from moefold.convert.family import (
    GATED_SHARED_EXPERT,
    USUAL,
    Family,
    MultimodalFolder,
    attention_fields,
    by_attention,
    grouped,
    layer_rules,
    layouts,
)
from moefold.convert.key_reader import Json
from moefold.convert.layer_fields import LINEAR_LAYERS, SparseLayers
from moefold.convert.mtp import MTP_PREFIX, has_qwen_mtp
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import Shape, SliceMapping, TensorBlock, TensorRule
from moefold.errors import ConfigError


def _gated_heads(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return queries and output gates of each head."""
    return model.attention.num_heads, (model.softmax_attention.head_dim,) * 2


def _key_heads(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return queries, keys, values and output gates of each key head (Qwen3-Next)."""
    heads = model.linear_attention.num_key_heads
    keys = model.linear_attention.key_head_dim
    values = model.linear_attention.num_value_heads // heads * model.linear_attention.value_head_dim
    return heads, (keys, keys, values, values)


def _value_heads(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return write strengths and decays of each key head."""
    heads = model.linear_attention.num_key_heads
    return heads, (model.linear_attention.num_value_heads // heads,) * 2


def _queries_keys_values(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return all queries, all keys and all values."""
    keys = model.linear_attention.num_key_heads * model.linear_attention.key_head_dim
    return 1, (keys, keys, model.linear_attention.num_value_heads * model.linear_attention.value_head_dim)


_WQKV = ("attention.wq", "attention.wk", "attention.wv")
DELTANET: dict[str, TensorRule] = {
    **grouped(
        ("attention.conv_q", "attention.conv_k", "attention.conv_v"),
        "linear_attn.conv1d.weight",
        _queries_keys_values,
        num_dims=3,
    ),
    **layer_rules(
        {
            "attention.wo": "linear_attn.out_proj.weight",
            "attention.a_log": "linear_attn.A_log",
            "attention.dt_bias": "linear_attn.dt_bias",
            "attention.norm.weight": "linear_attn.norm.weight",
        }
    ),
}
_QWEN3_NEXT_DELTANET: dict[str, TensorRule] = {
    **DELTANET,
    **grouped((*_WQKV, "attention.wg"), "linear_attn.in_proj_qkvz.weight", _key_heads),
    **grouped(("attention.wb", "attention.wa"), "linear_attn.in_proj_ba.weight", _value_heads),
}
_QWEN3_5_DELTANET: dict[str, TensorRule] = {
    **DELTANET,
    **grouped(_WQKV, "linear_attn.in_proj_qkv.weight", _queries_keys_values),
    **layer_rules(
        {
            "attention.wg": "linear_attn.in_proj_z.weight",
            "attention.wb": "linear_attn.in_proj_b.weight",
            "attention.wa": "linear_attn.in_proj_a.weight",
        }
    ),
}
_GATED_ATTENTION = {**USUAL, **grouped(("attention.wq", "attention.wg"), "self_attn.q_proj.weight", _gated_heads)}


@dataclass(frozen=True)
class QwenMTPLayer:
    """Rule of a parameter of a layer, whose MTP layers have the names of mtp.layers.0 and on (Qwen3-Next).

    Attributes:
        rule: of the other layers.
    """

    rule: TensorRule

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield the slice mappings of the rule, under the names of the layer."""
        number = int(layer) - model.num_layers
        for piece in self.rule.slices(param_name, shape, layer, model):
            name = piece.hf_name.replace(f"model.layers.{layer}.", f"{MTP_PREFIX}layers.{number}.", 1)
            yield replace(piece, hf_name=name) if number >= 0 else piece


_QWEN_MTP: dict[str, TensorRule] = {
    "layers.{l}.projection": TensorBlock("mtp.fc.weight"),
    "layers.{l}.embedding_norm.weight": TensorBlock("mtp.pre_fc_norm_embedding.weight"),
    "layers.{l}.hidden_norm.weight": TensorBlock("mtp.pre_fc_norm_hidden.weight"),
    "layers.{l}.output_norm.weight": TensorBlock("mtp.norm.weight"),
}
"""Tensors that the one MTP layer of a Qwen folder adds to the tensors of an ordinary layer."""


@dataclass(frozen=True)
class QwenMTPLayers:
    """Number of MTP layers of a Qwen folder: 0, or 1 of full attention and experts, like the last of the others.

    Attributes:
        hf_key: key of config.json, which folders may lack.
    """

    hf_key: str

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number; 0 if absent, and `count_mtp_layers` looks for the layer."""
        found = Renamed(self.hf_key, "mtp_layers", 0).read(hf_config)
        if found["mtp_layers"] not in (0, 1):
            raise ConfigError(f"config.json has {self.hf_key}={found['mtp_layers']}; moefold reads 0 or 1")
        return found

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number; an MTP layer of another kind than theirs reads back as none."""
        return {self.hf_key: model.mtp_layers} if model.mtp_layers and has_qwen_mtp(model) else {}


_QWEN_HYBRID: tuple[ConfigField, ...] = (
    *attention_fields(1e-6, RopeParameters(1e4, fraction=0.25), head_size=256),
    *allowed(attention_bias=(False,)),
    LINEAR_LAYERS,
    Constants({"attention.gate": {}, "attention.qk_norm": {}, "norm.zero_centered": True}),
    *renamed(linear_conv_kernel_dim=("linear_attention.conv_kernel", 4)),
    Renamed("linear_key_head_dim", "linear_attention.key_head_dim", 128),
    Renamed("linear_value_head_dim", "linear_attention.value_head_dim", 128),
    Renamed("linear_num_key_heads", "linear_attention.num_key_heads", 16),
    Renamed("linear_num_value_heads", "linear_attention.num_value_heads", 32),
    *renamed(num_experts_per_tok="ffn.moe.top_k", moe_intermediate_size="ffn.moe.intermediate_size"),
    num_experts("num_experts"),
    GatedSharedExpert(),
)


def _qwen_layouts(deltanet: dict[str, TensorRule]) -> tuple[dict[str, TensorRule], ...]:
    """Return the layouts of a Qwen family with Gated DeltaNet."""
    tables = layouts(by_attention(deltanet, _GATED_ATTENTION), GATED_SHARED_EXPERT)
    return tuple(
        {name: QwenMTPLayer(rule) if name.startswith("layers.") else rule for name, rule in table.items()} | _QWEN_MTP
        for table in tables
    )


QWEN_HYBRID_FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (
            *_QWEN_HYBRID,
            SparseLayers(),
            *renamed(intermediate_size="ffn.dense.intermediate_size"),
            NormTopKProb(default=True),
            QwenMTPLayers("num_nextn_predict_layers"),
        ),
        _qwen_layouts(_QWEN3_NEXT_DELTANET),
        default_keys={"num_key_value_heads": 2},
        has_mtp=True,
        mtp_unreported=None,
        mtp_prefix=MTP_PREFIX,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        (
            *_QWEN_HYBRID,
            *allowed(attn_output_gate=(True,), mtp_use_dedicated_embeddings=(False,)),
            QwenMTPLayers("mtp_num_hidden_layers"),
        ),
        _qwen_layouts(_QWEN3_5_DELTANET),
        default_keys={"num_key_value_heads": 2},
        has_mtp=True,
        mtp_unreported=None,
        mtp_key="mtp_num_hidden_layers",
        mtp_prefix=MTP_PREFIX,
        multimodal=MultimodalFolder("qwen3_5_moe", r"model\.visual\..*", {"model.language_model.": "model."}),
    ),
)
"""Families in the order in which an export without --family tries them."""
