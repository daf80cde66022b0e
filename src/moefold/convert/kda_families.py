"""Families with Kimi Delta Attention: Kimi-Linear and Ling 3 (bailing_hybrid). Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.config_fields import (
    AllowedValues,
    ConfigField,
    Constant,
    LatentHeadSizes,
    MultiHeadKeyValue,
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
    MIXTRAL_EXPERTS,
    MLA,
    PER_EXPERT,
    ROUTER,
    SHARED_EXPERTS,
    SILU,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    backbone_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.key_reader import Json, mark_read, overlay
from moefold.convert.layer_fields import MlpLayerTypes
from moefold.convert.linear_families import LinearLayers, by_attention
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import RenamedTensor, Shape, SliceMapping, TensorRule, fill_in_layer
from moefold.errors import ConfigError

KIMI_SIZES = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")


@dataclass(frozen=True)
class KimiLinearSizes:
    """Layers and heads of Kimi-Linear: `linear_attn_config` of released folders, or the keys that transformers writes.

    Numbers of layers in `linear_attn_config` start at 1.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        mark_read(hf_config, *KIMI_SIZES)
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
        return found | LinearLayers().read(overlay(hf_config, {"layer_types": types}))

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
    AllowedValues("hidden_act", SILU),
    MultiHeadKeyValue(),
    Constant("attention", "mla"),
    Constant("rope_pattern", "N"),
    LatentHeadSizes(has_head_dim=False),
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


@dataclass(frozen=True)
class LingLayers:
    """Layers and heads of Ling 3: `layer_types` or `layer_group_size`, and the sizes of Kimi Delta Attention.

    A folder that transformers wrote has linear_head_dim, and in head_dim another width; a released one has head_dim.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        sizes = {
            "linear_head_dim": hf_config.get("linear_head_dim", hf_config.get("head_dim", 128)),
            "linear_num_heads": hf_config.get("linear_num_heads", hf_config.get("num_attention_heads")),
            "linear_conv_kernel_dim": hf_config.get(
                "linear_conv_kernel_dim", hf_config.get("short_conv_kernel_size", 4)
            ),
        }
        every = hf_config.get("layer_group_size", 6)
        types = hf_config.get("layer_types")
        if types is None and is_int(every) and every > 0:
            count = num_layers_of(hf_config)
            types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        return KimiLinearSizes().read(overlay(hf_config, {**sizes, "layer_types": types or []}))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the keys of transformers and of released folders."""
        written = KimiLinearSizes().write(model)
        return written | {
            "head_dim": written["linear_head_dim"],
            "short_conv_kernel_size": written["linear_conv_kernel_dim"],
        }


@dataclass(frozen=True)
class DecayBound:
    """`kda_lower_bound` of the logarithm of a decay, if `kda_safe_gate`."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the bound; 0 means none."""
        is_bounded = hf_config.get("kda_safe_gate", True)
        found = Renamed("kda_lower_bound", "linear_decay_bound", -5.0).read(hf_config)
        if not isinstance(is_bounded, bool) or found["linear_decay_bound"] >= 0:
            raise ConfigError(
                f"config.json has kda_safe_gate={is_bounded!r} and kda_lower_bound={found['linear_decay_bound']}, "
                "which should be true or false, and below 0"
            )
        return found if is_bounded else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write switch and bound."""
        is_bounded = model.linear_decay_bound < 0
        return {"kda_safe_gate": is_bounded} | ({"kda_lower_bound": model.linear_decay_bound} if is_bounded else {})


_BAILING: tuple[ConfigField, ...] = (
    *backbone_sizes(1e-6, RopeParameters(6e6, scales_scores=True)),
    AllowedValues("tie_word_embeddings", (False,)),
    MultiHeadKeyValue(),
    Constant("attention", "mla"),
    Constant("rope_interleaved", True),
    Constant("attention_gate", True),
    Constant("attention_gate_width", "head"),
    Constant("linear_attention", "kda"),
    Constant("linear_full_rank_gates", True),
    LatentHeadSizes(has_head_dim=False),
    QueryLoraRank(),
    Renamed("kv_lora_rank", "kv_lora_rank", 512),
    Renamed("qk_nope_head_dim", "qk_nope_head_dim", 128),
    Renamed("qk_rope_head_dim", "qk_rope_head_dim", 64),
    Renamed("v_head_dim", "v_head_dim", 128),
    AllowedValues("attention_bias", (False,)),
    LingLayers(),
    DecayBound(),
    MlpLayerTypes(default=2),
    Renamed("intermediate_size", "ffn_hidden_size"),
    NumExperts("num_experts"),
    Renamed("num_experts_per_token", "top_k", 8),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    SharedExperts("num_shared_experts", default=1),
    Constant("router_score", "sigmoid"),
    Constant("expert_bias", True),
    Renamed("routed_scaling_factor", "router_scaling_factor", 2.5),
    Renamed("moe_renormalize", "router_normalize", True),
    RouterGroups(hf_key="num_expert_group"),
)
_LING_KDA: dict[str, TensorRule] = {
    **layer_rules(
        {
            **{f"attention.w{name}": f"attention.{name}_proj.weight" for name in "qkvbg"},
            "attention.wa": "attention.f_proj.weight",
            "attention.wo": "attention.dense.weight",
            "attention.dt_bias": "attention.dt_bias",
            "attention.a_log": "attention.A_log",
            "attention.norm.weight": "attention.o_norm.weight",
        }
    ),
    **{
        f"layers.{{l}}.attention.conv_{name}": ReshapedTensor(
            f"model.layers.{{l}}.attention.{name}_conv1d.weight", 3, (0, 2)
        )
        for name in "qkv"
    },
}
_LING_MLA = layer_rules(
    {
        "attention.wq": "attention.q_proj.weight",
        "attention.wq_down": "attention.q_a_proj.weight",
        "attention.query_norm.weight": "attention.q_a_layernorm.weight",
        "attention.wq_up": "attention.q_b_proj.weight",
        "attention.wkv_down": "attention.kv_a_proj_with_mqa.weight",
        "attention.key_value_norm.weight": "attention.kv_a_layernorm.weight",
        "attention.wkv_up": "attention.kv_b_proj.weight",
        "attention.wg": "attention.g_proj.weight",
        "attention.wo": "attention.dense.weight",
    }
)
_LING_OTHERS: dict[str, TensorRule] = {
    "embedding.weight": RenamedTensor("model.word_embeddings.weight"),
    **layer_rules({"ffn.router.expert_bias": "mlp.gate.expert_bias"}),
}

KDA_FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        _KIMI_LINEAR,
        tuple(
            merge_rules(by_attention(_KDA, merge_rules(BACKBONE, MLA)), _KIMI_FFN, experts)
            for experts in (MIXTRAL_EXPERTS, STACKED_EXPERTS)
        ),
        default_keys={"num_key_value_heads": 32, "q_lora_rank": None},
        renamed_modules={"block_sparse_moe": "mlp"},
    ),
    Family(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        _BAILING,
        tuple(
            merge_rules(
                BACKBONE,
                by_attention(_LING_KDA, _LING_MLA),
                DENSE_FFN,
                ROUTER,
                SHARED_EXPERTS,
                _LING_OTHERS,
                experts,
            )
            for experts in (PER_EXPERT, STACKED_EXPERTS)
        ),
        default_keys={"num_key_value_heads": 32, "num_expert_group": 8, "topk_group": 4},
        renamed_modules={"attention": "self_attn", "dense": "o_proj"},
    ),
)
"""Families in the order in which an export without --family tries them."""
