"""Families with Kimi Delta Attention: Kimi-Linear and Ling 3 (bailing_hybrid). Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.config_fields import (
    ConfigField,
    Constants,
    Renamed,
    RouterGroups,
    SharedExperts,
    allowed,
    is_int,
    num_experts,
    num_layers_of,
    renamed,
    setting_of,
)
from moefold.convert.family import (
    MIXTRAL_EXPERTS,
    MLA,
    USUAL,
    Family,
    backbone_fields,
    by_attention,
    ffn_rules,
    latent_fields,
    layer_rules,
    layouts,
    mla_rules,
)
from moefold.convert.key_reader import Json, mark_read, overlay
from moefold.convert.layer_fields import LINEAR_LAYERS, MlpLayerTypes, types_by_interval
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import TensorBlock, TensorRule
from moefold.errors import ConfigError

_SIZES = (
    Renamed("linear_conv_kernel_dim", "linear_attention.conv_kernel"),
    Renamed("linear_head_dim", "linear_attention.key_head_dim", copies=("linear_attention.value_head_dim",)),
    Renamed("linear_num_heads", "linear_attention.num_value_heads", copies=("linear_attention.num_key_heads",)),
)


@dataclass(frozen=True)
class KimiLinearSizes:
    """Layers and heads of Kimi-Linear: `linear_attn_config` of released folders, or the keys that transformers writes.

    Numbers of layers in `linear_attn_config` start at 1.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        mark_read(hf_config, *(entry.hf_key for entry in _SIZES))
        nested = hf_config.get("linear_attn_config") or {}
        if not isinstance(nested, Mapping):
            raise ConfigError(f"config.json has linear_attn_config={nested!r}, which should be an object")
        names = {
            "linear_head_dim": ("head_dim", 128),
            "linear_num_heads": ("num_heads", 32),
            "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
        }
        keys = {key: nested.get(name, hf_config.get(key, default)) for key, (name, default) in names.items()}
        found = {key: value for entry in _SIZES for key, value in entry.read(keys).items()}
        types = hf_config.get("layer_types") or self._layer_types(nested, num_layers_of(hf_config))
        return found | LINEAR_LAYERS.read(overlay(hf_config, {"layer_types": types}))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the keys of transformers; heads of several sizes read back as another model."""
        return LINEAR_LAYERS.write(model) | {
            key: value for entry in _SIZES for key, value in entry.write(model).items()
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
class LingLayers:
    """Layers and heads of Ling 3: `layer_types` or `layer_group_size`, and the sizes of Kimi Delta Attention.

    A folder that transformers wrote has linear_head_dim, and in head_dim another width; a released one has head_dim.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        names = {
            "linear_head_dim": ("head_dim", 128),
            "linear_num_heads": ("num_attention_heads", None),
            "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
        }
        sizes = {key: hf_config.get(key, hf_config.get(name, default)) for key, (name, default) in names.items()}
        every = hf_config.get("layer_group_size", 6)
        types = hf_config.get("layer_types")
        if types is None and is_int(every) and every > 0:
            types = types_by_interval(num_layers_of(hf_config), every, "linear_attention")
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
        found = Renamed("kda_lower_bound", "linear_attention.decay_bound", -5.0).read(hf_config)
        if not isinstance(is_bounded, bool) or found["linear_attention.decay_bound"] >= 0:
            raise ConfigError(
                f"config.json has kda_safe_gate={is_bounded!r} and "
                f"kda_lower_bound={found['linear_attention.decay_bound']}, "
                "which should be true or false, and below 0"
            )
        return found if is_bounded else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write switch and bound."""
        bound = setting_of(model, "linear_attention.decay_bound")
        return {"kda_safe_gate": bound < 0} | ({"kda_lower_bound": bound} if bound < 0 else {})


_EXPERTS: tuple[ConfigField, ...] = (
    *renamed(
        intermediate_size="ffn.dense.intermediate_size",
        moe_intermediate_size="ffn.moe.intermediate_size",
        moe_renormalize=("ffn.moe.router.normalize", True),
    ),
    SharedExperts("num_shared_experts", default=1),
    Constants({"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True, "linear_attention": "kda"}),
    RouterGroups(hf_key="num_expert_group"),
)
_KIMI_LINEAR: tuple[ConfigField, ...] = (
    *backbone_fields(1e-5, None),
    *latent_fields(has_head_dim=False),
    Constants({"attention": "mla", "layers.position": "nope"}),
    *allowed(mla_use_nope=(True,)),
    KimiLinearSizes(),
    MlpLayerTypes(default=1),
    *renamed(
        num_experts="ffn.moe.num_experts",
        num_experts_per_token="ffn.moe.top_k",
        routed_scaling_factor=("ffn.moe.router.scaling_factor", 2.446),
    ),
    *_EXPERTS,
    *allowed(moe_router_activation_func=("sigmoid",), moe_layer_freq=(1,), num_nextn_predict_layers=(0,)),
)
_BAILING: tuple[ConfigField, ...] = (
    *backbone_fields(1e-6, RopeParameters(6e6, scales_scores=True)),
    *allowed(tie_word_embeddings=(False,)),
    *latent_fields(has_head_dim=False, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    Constants(
        {
            "attention": "mla",
            "rope.interleaved": True,
            "attention.gate": {},
            "attention.gate.per": "head",
            "linear_attention.full_rank_gates": True,
        }
    ),
    LingLayers(),
    DecayBound(),
    MlpLayerTypes(default=2),
    num_experts("num_experts"),
    *renamed(num_experts_per_token=("ffn.moe.top_k", 8), routed_scaling_factor=("ffn.moe.router.scaling_factor", 2.5)),
    *_EXPERTS,
)


def _convolutions(module: str) -> dict[str, TensorRule]:
    """Return the rules of the convolutions of queries, keys and values, [channels, 1, K]."""
    return {
        f"layers.{{l}}.attention.conv_{x}": TensorBlock(f"model.layers.{{l}}.{module}.{x}_conv1d.weight", dims=(0, 2))
        for x in "qkv"
    }


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
    **_convolutions("self_attn"),
    "layers.{l}.attention.a_log": TensorBlock("model.layers.{l}.self_attn.A_log", dims=(2,), num_dims=4),
}
_KIMI_FFN: dict[str, TensorRule] = {
    **ffn_rules("ffn", "block_sparse_moe"),
    **ffn_rules("ffn.shared", "block_sparse_moe.shared_experts"),
    **layer_rules(
        {
            "ffn.router.weight": "block_sparse_moe.gate.weight",
            "ffn.router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
        }
    ),
}
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
    **_convolutions("attention"),
}
_LING_MLA: dict[str, TensorRule] = {
    **mla_rules("attention"),
    **layer_rules(
        {
            "attention.wq": "attention.q_proj.weight",
            "attention.wg": "attention.g_proj.weight",
            "attention.wo": "attention.dense.weight",
        }
    ),
}

KDA_FAMILIES = (
    Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        _KIMI_LINEAR,
        layouts(by_attention(_KDA, {**USUAL, **MLA}), _KIMI_FFN, experts=MIXTRAL_EXPERTS),
        default_keys={"num_key_value_heads": 32, "q_lora_rank": None},
        renamed_modules={"block_sparse_moe": "mlp"},
    ),
    Family(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        _BAILING,
        layouts(
            by_attention(_LING_KDA, _LING_MLA),
            {"embedding.weight": TensorBlock("model.word_embeddings.weight")},
            layer_rules({"ffn.router.expert_bias": "mlp.gate.expert_bias"}),
        ),
        default_keys={"num_key_value_heads": 32, "num_expert_group": 8, "topk_group": 4},
        renamed_modules={"attention": "self_attn", "dense": "o_proj"},
    ),
)
"""Families in the order in which an export without --family tries them."""
