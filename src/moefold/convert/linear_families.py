"""Hybrid families of Qwen, with Gated DeltaNet; layers of linear attention in config.json. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.patterns import ATTENTION_KINDS
from moefold.convert.config_fields import (
    AllowedValues,
    ConfigField,
    Constant,
    GatedSharedExpert,
    NormTopKProb,
    Renamed,
    is_int,
    num_layers_of,
)
from moefold.convert.family import (
    BACKBONE,
    DENSE_FFN,
    HEAD_NORMS,
    PER_EXPERT,
    ROUTER,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    Family,
    MultimodalFolder,
    NumExperts,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.key_reader import Json, mark_read, overlay
from moefold.convert.layer_fields import SparseLayers, UniformLayers, letters_of, shorten_pattern
from moefold.convert.mtp import MTP_PREFIX, has_qwen_mtp
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import RenamedTensor, Shape, SliceMapping, TensorRule, fill_in_layer
from moefold.errors import ConfigError


@dataclass(frozen=True)
class LinearLayers:
    """`layer_types`; without it, full attention in every n-th layer, `full_attention_interval`."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern."""
        mark_read(hf_config, "full_attention_interval")
        types = hf_config.get("layer_types")
        if types is None:
            every = hf_config.get("full_attention_interval", 4)
            if not is_int(every) or every < 1:
                raise ConfigError(
                    f"config.json has full_attention_interval={every!r}, which should be a whole number from 1 on"
                )
            count = num_layers_of(hf_config)
            types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        letters = letters_of(
            overlay(hf_config, {"layer_types": types}), "layer_types", {"linear_attention": "L", "full_attention": "F"}
        )
        return {"attention_pattern": shorten_pattern(letters, ATTENTION_KINDS)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        return {"layer_types": [_layer_type(layer) for layer in model.layers]}


def _layer_type(layer: Layer) -> str:
    """Return the entry of `layer_types` of a layer."""
    if layer.attention.is_recurrent:
        return "linear_attention"
    return "sliding_attention" if layer.window else "chunked_attention" if layer.chunk else "full_attention"


@dataclass(frozen=True)
class GroupedRows:
    """Rows of an HF matrix that fuses several of our matrices head by head (Qwen3-Next).

    The rows of the HF matrix are groups; a group has some rows of each of our matrices, one matrix after another.

    Attributes:
        hf_name: its name.
        kind: "gate": queries and output gates of each head; "qkvz": queries, keys, values and output gates of each key
            head; "ba": write strengths and decays of each key head.
        part: our matrix.
    """

    hf_name: str
    kind: Literal["gate", "qkvz", "ba"]
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping per group."""
        num_groups, widths = self._groups(model)
        size = widths[self.part]
        offset = sum(widths[: self.part])
        hf_name = fill_in_layer(self.hf_name, layer)
        for group in range(num_groups):
            start = (group * sum(widths) + offset, 0)
            yield SliceMapping(param_name, (group * size, 0), (size, shape[1]), hf_name, start, (1, 1), (0, 1))

    def _groups(self, model: ModelConfig) -> tuple[int, tuple[int, ...]]:
        """Return the number of groups, and the rows of each of our matrices in one."""
        if self.kind == "gate":
            return model.num_attention_heads, (model.softmax_attention.head_dim, model.softmax_attention.head_dim)
        heads = model.linear_num_key_heads
        values = model.linear_num_value_heads // heads
        if self.kind == "ba":
            return heads, (values, values)
        key_width = model.linear_key_head_dim
        value_width = values * model.linear_value_head_dim
        return heads, (key_width, key_width, value_width, value_width)


@dataclass(frozen=True)
class QkvRows:
    """Rows of an HF tensor over queries, keys and values, [2*keys + values, ...], for one of our three.

    Attributes:
        hf_name: its name.
        part: 0 for queries, 1 for keys, 2 for values.
        num_dims: its dims: 2 of a matrix, 3 of a convolution [.., 1, K].
    """

    hf_name: str
    part: int
    num_dims: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole parameter."""
        rest = (0,) * (self.num_dims - 1)
        start = (self.part * model.linear_num_key_heads * model.linear_key_head_dim, *rest)
        ones = (1,) * self.num_dims
        hf_name = fill_in_layer(self.hf_name, layer)
        yield SliceMapping(param_name, (0, 0), shape, hf_name, start, ones, (0, self.num_dims - 1))


_LINEAR = "model.layers.{l}.linear_attn"
_DELTANET: dict[str, TensorRule] = {
    **{
        f"layers.{{l}}.attention.conv_{name}": QkvRows(f"{_LINEAR}.conv1d.weight", part, 3)
        for part, name in enumerate("qkv")
    },
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
    **_DELTANET,
    **{
        f"layers.{{l}}.attention.w{name}": GroupedRows(f"{_LINEAR}.in_proj_qkvz.weight", "qkvz", part)
        for part, name in enumerate("qkvg")
    },
    **{
        f"layers.{{l}}.attention.w{name}": GroupedRows(f"{_LINEAR}.in_proj_ba.weight", "ba", part)
        for part, name in enumerate("ba")
    },
}
_QWEN3_5_DELTANET: dict[str, TensorRule] = {
    **_DELTANET,
    **{
        f"layers.{{l}}.attention.w{name}": QkvRows(f"{_LINEAR}.in_proj_qkv.weight", part, 2)
        for part, name in enumerate("qkv")
    },
    **layer_rules(
        {
            f"attention.w{ours}": f"linear_attn.in_proj_{theirs}.weight"
            for ours, theirs in (("g", "z"), ("b", "b"), ("a", "a"))
        }
    ),
}
_GATED_ATTENTION: dict[str, TensorRule] = {
    "layers.{l}.attention.wq": GroupedRows("model.layers.{l}.self_attn.q_proj.weight", "gate", 0),
    "layers.{l}.attention.wg": GroupedRows("model.layers.{l}.self_attn.q_proj.weight", "gate", 1),
}


@dataclass(frozen=True)
class ByAttention:
    """Rule of a parameter that layers of linear and of full attention both have, in other HF tensors.

    Attributes:
        linear: rule of layers of kind L.
        full: rule of the other layers.
    """

    linear: TensorRule
    full: TensorRule

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield the slice mappings of the rule of the layer's kind."""
        rule = self.linear if model.all_layers[int(layer)].attention.is_recurrent else self.full
        return rule.slices(param_name, shape, layer, model)


def by_attention(linear: dict[str, TensorRule], full: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """Return one table of the tables of both kinds of layers."""
    shared = linear.keys() & full.keys()
    return linear | full | {name: ByAttention(linear[name], full[name]) for name in shared}


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
    "layers.{l}.projection": RenamedTensor("mtp.fc.weight"),
    "layers.{l}.embedding_norm.weight": RenamedTensor("mtp.pre_fc_norm_embedding.weight"),
    "layers.{l}.hidden_norm.weight": RenamedTensor("mtp.pre_fc_norm_hidden.weight"),
    "layers.{l}.output_norm.weight": RenamedTensor("mtp.norm.weight"),
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
    *family_sizes(norm_eps=1e-6, rope_theta=1e4, head_size=256, rope=RopeParameters(1e4, fraction=0.25)),
    AllowedValues("attention_bias", (False,)),
    LinearLayers(),
    Constant("attention_gate", True),
    Constant("qk_norm", True),
    Constant("zero_centered_norms", True),
    Renamed("linear_conv_kernel_dim", "linear_conv_kernel", 4),
    Renamed("linear_key_head_dim", "linear_key_head_dim", 128),
    Renamed("linear_value_head_dim", "linear_value_head_dim", 128),
    Renamed("linear_num_key_heads", "linear_num_key_heads", 16),
    Renamed("linear_num_value_heads", "linear_num_value_heads", 32),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    NumExperts("num_experts"),
    GatedSharedExpert(),
)


def _qwen_layouts(deltanet: dict[str, TensorRule]) -> tuple[dict[str, TensorRule], ...]:
    """Return the layouts of a Qwen family with Gated DeltaNet."""
    attention = by_attention(deltanet, merge_rules(BACKBONE, HEAD_NORMS, _GATED_ATTENTION))
    layouts = []
    for experts in (PER_EXPERT, STACKED_EXPERTS):
        table = merge_rules(attention, DENSE_FFN, ROUTER, SHARED_EXPERT, experts)
        layers = {name: QwenMTPLayer(rule) for name, rule in table.items() if name.startswith("layers.")}
        layouts.append(merge_rules(table, layers, _QWEN_MTP))
    return tuple(layouts)


QWEN_HYBRID_FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        (
            *_QWEN_HYBRID,
            SparseLayers(),
            Renamed("intermediate_size", "ffn_hidden_size"),
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
            UniformLayers("M"),
            AllowedValues("attn_output_gate", (True,)),
            AllowedValues("mtp_use_dedicated_embeddings", (False,)),
            QwenMTPLayers("mtp_num_hidden_layers"),
        ),
        _qwen_layouts(_QWEN3_5_DELTANET),
        default_keys={"num_key_value_heads": 2},
        has_mtp=True,
        mtp_unreported=None,
        mtp_key="mtp_num_hidden_layers",
        mtp_prefix=MTP_PREFIX,
        multimodal=MultimodalFolder("qwen3_5_moe", "model.language_model.", r"model\.visual\..*"),
    ),
)
"""Families in the order in which an export without --family tries them."""
