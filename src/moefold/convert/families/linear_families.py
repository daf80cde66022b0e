"""Hybrid families with linear attention or short convolutions: Qwen, Kimi-Linear, Ling 3 and LFM2."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import (
    NUM_LAYERS,
    ConfigField,
    Constants,
    GatedSharedExpert,
    HeadSize,
    NormTopKProb,
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
from moefold.convert.families.family import (
    GATED_SHARED_EXPERT,
    KEY_VALUE_HEADS,
    MIXTRAL_EXPERTS,
    MLA,
    NUMBERED_PROJECTIONS,
    USUAL,
    Family,
    MultimodalFolder,
    attention_fields,
    backbone_fields,
    by_attention,
    expert_layouts,
    ffn_rules,
    fused,
    grouped,
    latent_fields,
    layer_rules,
    layouts,
    mla_rules,
)
from moefold.convert.families.known_keys import Json, mark_read, overlay
from moefold.convert.families.layer_fields import (
    LINEAR_LAYERS,
    FirstKDense,
    LayerTypes,
    MlpLayerTypes,
    SparseLayers,
    types_by_interval,
)
from moefold.convert.families.mtp import MTP_PREFIX, has_qwen_mtp
from moefold.convert.families.rope_fields import RopeParameters
from moefold.convert.families.tensor_mapping import Shape, SliceMapping, TensorBlock, TensorRule
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
    """Rule of a parameter of a layer, where MTP layers are named mtp.layers.0 and so on (Qwen3-Next)."""

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
"""Tensors of the MTP layer of a Qwen folder in addition to the tensors of an ordinary layer."""


@dataclass(frozen=True)
class QwenMTPLayers:
    """Number of MTP layers of a Qwen folder: 0, or 1 with full attention and experts, like the last layer."""

    hf_key: str

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the number. 0 if absent: `count_mtp_layers` then searches for the layer."""
        settings = Renamed(self.hf_key, "mtp_layers", 0).read(hf_config)
        if settings["mtp_layers"] not in (0, 1):
            raise ConfigError(f"config.json has {self.hf_key}={settings['mtp_layers']}; moefold reads 0 or 1")
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the number. An MTP layer of a different kind reads back as no layer."""
        return {self.hf_key: model.mtp_layers} if model.mtp_layers and has_qwen_mtp(model) else {}


def deltanet_fields(num_key_heads: int, num_value_heads: int) -> tuple[Renamed, ...]:
    """Return the fields of the sizes of Gated DeltaNet, given the defaults of its heads."""
    return renamed(
        linear_conv_kernel_dim=("linear_attention.conv_kernel", 4),
        linear_key_head_dim=("linear_attention.key_head_dim", 128),
        linear_value_head_dim=("linear_attention.value_head_dim", 128),
        linear_num_key_heads=("linear_attention.num_key_heads", num_key_heads),
        linear_num_value_heads=("linear_attention.num_value_heads", num_value_heads),
    )


_QWEN_HYBRID: tuple[ConfigField, ...] = (
    *attention_fields(1e-6, RopeParameters(1e4, fraction=0.25), head_size=256),
    *allowed(attention_bias=(False,)),
    LINEAR_LAYERS,
    Constants({"attention.gate": {}, "attention.qk_norm": {}, "norm.zero_centered": True}),
    *deltanet_fields(16, 32),
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
"""Families in the order of trial of an export without --family."""


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
        settings = {key: value for entry in _SIZES for key, value in entry.read(keys).items()}
        types = hf_config.get("layer_types") or self._layer_types(nested, num_layers_of(hf_config))
        return settings | LINEAR_LAYERS.read(overlay(hf_config, {"layer_types": types}))

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the keys of transformers. Heads of several sizes do not read back as the same model."""
        return LINEAR_LAYERS.write(model) | {
            key: value for entry in _SIZES for key, value in entry.write(model).items()
        }

    @staticmethod
    def _layer_types(nested: Json, count: int) -> list[str]:
        """Return the types of all layers. Without lists, every fourth layer is full, from 4 on, as in transformers."""
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

    A folder from transformers has linear_head_dim, and another width in head_dim. A released folder has head_dim.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the attention pattern, the heads and the convolution."""
        names = {
            "linear_head_dim": ("head_dim", 128),
            "linear_num_heads": ("num_attention_heads", None),
            "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
        }
        sizes = {key: hf_config.get(key, hf_config.get(name, default)) for key, (name, default) in names.items()}
        interval = hf_config.get("layer_group_size", 6)
        types = hf_config.get("layer_types")
        if types is None and is_int(interval) and interval > 0:
            types = types_by_interval(num_layers_of(hf_config), interval, "linear_attention")
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
        """Read the bound. 0: no bound."""
        is_bounded = hf_config.get("kda_safe_gate", True)
        settings = Renamed("kda_lower_bound", "linear_attention.decay_bound", -5.0).read(hf_config)
        if not isinstance(is_bounded, bool) or settings["linear_attention.decay_bound"] >= 0:
            raise ConfigError(
                f"config.json has kda_safe_gate={is_bounded!r} and "
                f"kda_lower_bound={settings['linear_attention.decay_bound']}, "
                "which should be true or false, and below 0"
            )
        return settings if is_bounded else {}

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
"""Families in the order of trial of an export without --family."""


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
"""Families in the order of trial of an export without --family."""
