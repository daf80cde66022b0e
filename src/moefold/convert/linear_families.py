"""Families with layers of linear attention. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moefold.config.model import ATTENTION_KINDS, ModelConfig
from moefold.convert.config_fields import (
    AllowedValues,
    ConfigField,
    Constant,
    GatedSharedExpert,
    Json,
    MultiHeadKeyValue,
    NormTopKProb,
    QueryLoraRank,
    Renamed,
    RouterGroups,
    SharedExperts,
    is_int,
    num_layers_of,
)
from moefold.convert.family import (
    BACKBONE,
    DENSE_FFN,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    MLA,
    PER_EXPERT,
    ROUTER,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.layer_fields import MlpLayerTypes, SparseLayers, letters_of, shorten_pattern
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import Shape, SliceMapping, TensorRule, fill_in_layer
from moefold.errors import ConfigError


@dataclass(frozen=True)
class LinearLayers:
    """`layer_types`; without it, full attention in every n-th layer, `full_attention_interval`."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern."""
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
            {**hf_config, "layer_types": types}, "layer_types", {"linear_attention": "L", "full_attention": "F"}
        )
        return {"attention_pattern": shorten_pattern(letters, ATTENTION_KINDS)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the type of every layer."""
        names = {"L": "linear_attention", "F": "full_attention", "W": "sliding_attention", "C": "chunked_attention"}
        return {"layer_types": [names[letter] for letter in model.attention_letters]}


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
            return model.num_attention_heads, (model.head_size, model.head_size)
        heads = model.linear_num_key_heads
        values = model.linear_num_value_heads // heads
        if self.kind == "ba":
            return heads, (values, values)
        key_width = model.linear_key_head_dim
        value_width = values * model.linear_value_head_dim
        return heads, (key_width, key_width, value_width, value_width)


@dataclass(frozen=True)
class ConvolutionRows:
    """Rows of an HF convolution [2*keys + values, 1, K] over queries, keys and values, for one of our three.

    Attributes:
        hf_name: its name.
        part: 0 for queries, 1 for keys, 2 for values.
    """

    hf_name: str
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole parameter."""
        start = (self.part * model.linear_num_key_heads * model.linear_key_head_dim, 0, 0)
        yield SliceMapping(param_name, (0, 0), shape, fill_in_layer(self.hf_name, layer), start, (1, 1, 1), (0, 2))


_LINEAR = "model.layers.{l}.linear_attn"
_GATED_DELTANET: dict[str, TensorRule] = {
    **{
        f"layers.{{l}}.attention.w{name}": GroupedRows(f"{_LINEAR}.in_proj_qkvz.weight", "qkvz", part)
        for part, name in enumerate("qkvg")
    },
    **{
        f"layers.{{l}}.attention.w{name}": GroupedRows(f"{_LINEAR}.in_proj_ba.weight", "ba", part)
        for part, name in enumerate("ba")
    },
    **{
        f"layers.{{l}}.attention.conv_{name}": ConvolutionRows(f"{_LINEAR}.conv1d.weight", part)
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
        rule = self.linear if model.attention_letters[int(layer)] == "L" else self.full
        return rule.slices(param_name, shape, layer, model)


def _both(linear: dict[str, TensorRule], full: dict[str, TensorRule]) -> dict[str, TensorRule]:
    """Return one table of the tables of both kinds of layers."""
    shared = linear.keys() & full.keys()
    return linear | full | {name: ByAttention(linear[name], full[name]) for name in shared}


_QWEN3_NEXT: tuple[ConfigField, ...] = (
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
    SparseLayers(),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("num_experts_per_tok", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    NormTopKProb(default=True),
    NumExperts("num_experts"),
    GatedSharedExpert(),
)


@dataclass(frozen=True)
class KimiLinearSizes:
    """Layers and heads of Kimi-Linear: `linear_attn_config` of released folders, or the keys that transformers writes.

    Numbers of layers in `linear_attn_config` start at 1.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        nested = hf_config.get("linear_attn_config") or {}
        if not isinstance(nested, Mapping):
            raise ConfigError(f"config.json has linear_attn_config={nested!r}, which should be an object")
        names = {
            "linear_head_dim": ("head_dim", 128),
            "linear_num_heads": ("num_heads", 32),
            "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
        }
        keys = {key: nested.get(name, hf_config.get(key, default)) for key, (name, default) in names.items()}
        found: dict[str, Any] = Renamed("linear_conv_kernel_dim", "linear_conv_kernel").read(keys)
        for part in ("key", "value"):
            found |= Renamed("linear_head_dim", f"linear_{part}_head_dim").read(keys)
            found |= Renamed("linear_num_heads", f"linear_num_{part}_heads").read(keys)
        types = hf_config.get("layer_types") or self._layer_types(nested, num_layers_of(hf_config))
        return found | LinearLayers().read({**hf_config, "layer_types": types})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the keys of transformers; heads of several sizes read back as another model."""
        return LinearLayers().write(model) | {
            "linear_head_dim": model.linear_key_head_dim,
            "linear_num_heads": model.linear_num_value_heads,
            "linear_conv_kernel_dim": model.linear_conv_kernel,
        }

    @staticmethod
    def _layer_types(nested: Json, count: int) -> list[str]:
        """Return the types of all layers; without lists of layers, as transformers: every fourth is full, from 4 on."""
        full = nested.get("full_attn_layers", [i + 1 for i in range(4, count, 4)])
        linear = nested.get("kda_layers", [i + 1 for i in range(count) if i + 1 not in full])
        if not isinstance(full, list) or not isinstance(linear, list) or {*full, *linear} != {*range(1, count + 1)}:
            raise ConfigError(
                f"config.json has linear_attn_config with full_attn_layers={full!r} and kda_layers={linear!r}, which "
                f"should hold each layer from 1 to {count}"
            )
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]


@dataclass(frozen=True)
class ReshapedTensor:
    """HF tensor with further dims of size 1.

    Attributes:
        hf_name: its name.
        num_dims: its dims.
        dims: for each of our dims the matching HF dim.
    """

    hf_name: str
    num_dims: int
    dims: tuple[int, ...]

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole tensor."""
        zeros = (0,) * self.num_dims
        ones = (1,) * self.num_dims
        hf_name = fill_in_layer(self.hf_name, layer)
        yield SliceMapping(param_name, (0,) * len(shape), shape, hf_name, zeros, ones, self.dims)


_KDA: dict[str, TensorRule] = {
    **layer_rules(
        {
            **{f"attention.w{name}": f"self_attn.{name}_proj.weight" for name in "qkvbo"},
            "attention.wa_down": "self_attn.f_a_proj.weight",
            "attention.wa_up": "self_attn.f_b_proj.weight",
            "attention.wg_down": "self_attn.g_a_proj.weight",
            "attention.wg_up": "self_attn.g_b_proj.weight",
            "attention.dt_bias": "self_attn.dt_bias",
            "attention.norm.weight": "self_attn.o_norm.weight",
        }
    ),
    **{
        f"layers.{{l}}.attention.conv_{name}": ReshapedTensor(
            f"model.layers.{{l}}.self_attn.{name}_conv1d.weight", 3, (0, 2)
        )
        for name in "qkv"
    },
    "layers.{l}.attention.a_log": ReshapedTensor("model.layers.{l}.self_attn.A_log", 4, (2,)),
}
_KIMI_FFN = layer_rules(
    {
        **{f"ffn.w_{x}": f"block_sparse_moe.{x}_proj.weight" for x in ("gate", "up", "down")},
        **{f"ffn.shared.w_{x}": f"block_sparse_moe.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")},
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
    }
)
_KIMI_LINEAR: tuple[ConfigField, ...] = (
    Renamed("num_hidden_layers", "num_layers"),
    Renamed("hidden_size", "hidden_size"),
    Renamed("num_attention_heads", "num_attention_heads"),
    Renamed("vocab_size", "vocab_size"),
    Renamed("rms_norm_eps", "norm_eps", 1e-5),
    Renamed("tie_word_embeddings", "tie_embeddings", False),
    Renamed("initializer_range", "init_std", 0.02),
    AllowedValues("hidden_act", ("silu",)),
    MultiHeadKeyValue(),
    Constant("attention", "mla"),
    Constant("rope_pattern", "N"),
    Constant("linear_attention", "kda"),
    QueryLoraRank(),
    Renamed("kv_lora_rank", "kv_lora_rank"),
    Renamed("qk_nope_head_dim", "qk_nope_head_dim"),
    Renamed("qk_rope_head_dim", "qk_rope_head_dim"),
    Renamed("v_head_dim", "v_head_dim"),
    AllowedValues("attention_bias", (False,)),
    AllowedValues("mla_use_nope", (True,)),
    KimiLinearSizes(),
    MlpLayerTypes(default=1),
    Renamed("intermediate_size", "ffn_hidden_size"),
    Renamed("num_experts", "num_experts"),
    Renamed("num_experts_per_token", "top_k"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    SharedExperts("num_shared_experts", default=1),
    Constant("router_score", "sigmoid"),
    Constant("expert_bias", True),
    AllowedValues("moe_router_activation_func", ("sigmoid",)),
    Renamed("routed_scaling_factor", "router_scaling_factor", 2.446),
    Renamed("moe_renormalize", "router_normalize", True),
    RouterGroups(hf_key="num_expert_group"),
    AllowedValues("moe_layer_freq", (1,)),
    AllowedValues("num_nextn_predict_layers", (0,)),
)

LINEAR_FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        _KIMI_LINEAR,
        (merge_rules(_both(_KDA, merge_rules(BACKBONE, MLA)), _KIMI_FFN, MIXTRAL_EXPERTS),),
        default_keys={"num_key_value_heads": 32, "q_lora_rank": None},
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _QWEN3_NEXT,
        tuple(
            merge_rules(
                _both(_GATED_DELTANET, merge_rules(BACKBONE, HEAD_NORMS, _GATED_ATTENTION)),
                DENSE_FFN,
                ROUTER,
                SHARED_EXPERT,
                experts,
            )
            for experts in (PER_EXPERT, STACKED_EXPERTS)
        ),
        default_keys={"num_key_value_heads": 2},
        ignored_tensors=(r"mtp\..*",),
    ),
)
