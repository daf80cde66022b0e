"""Families with grouped-query attention and a softmax router, or the sigmoid router of DeepSeek-V3."""

from dataclasses import dataclass
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import (
    MTP_LAYERS,
    AttentionMultiplier,
    ConfigField,
    Constants,
    HunyuanSharedExpert,
    InputScaling,
    NormTopKProb,
    Renamed,
    RouterGroups,
    SameForAllLayers,
    SharedExperts,
    allowed,
    attention_bias,
    interval_of,
    is_int,
    num_experts,
    num_layers_of,
    renamed,
    setting_of,
)
from moefold.convert.families.family import (
    MTP,
    Family,
    MultimodalFolder,
    attention_fields,
    ffn_rules,
    fused,
    layer_rules,
    layouts,
    mixtral_layouts,
    stacked_experts,
    untransposed_experts,
)
from moefold.convert.families.known_keys import Json, mark_read
from moefold.convert.families.layer_fields import (
    EveryNthFull,
    ExpertLayerRange,
    FirstKDense,
    MlpLayerTypes,
    SlidingWindowLayers,
    UniformWindow,
    attention_types,
    last_layers_slide,
    mapped_layer_types,
)
from moefold.convert.families.rope_fields import RopeParameters
from moefold.convert.families.tensor_mapping import TensorBlock
from moefold.errors import ConfigError

_GRANITE: tuple[ConfigField, ...] = (
    *attention_fields(1e-6, 1e4),
    attention_bias(has_output=True),
    AttentionMultiplier(),
    *renamed(
        embedding_multiplier=("embedding_multiplier", 1.0),
        residual_multiplier=("residual.multiplier", 1.0),
        logits_scaling=("logits_divisor", 1.0),
        num_local_experts=("ffn.moe.num_experts", 8),
        num_experts_per_tok=("ffn.moe.top_k", 2),
        intermediate_size="ffn.moe.intermediate_size",
    ),
    Constants({"ffn.moe.router.softmax": "post"}),
)
_GRANITE_LAYOUTS = layouts(
    layer_rules(
        {
            "ffn.router.weight": "block_sparse_moe.router.layer.weight",
            "ffn.shared.w_down": "shared_mlp.output_linear.weight",
        }
    ),
    fused(("ffn.shared.w_gate", "ffn.shared.w_up"), "shared_mlp.input_linear.weight"),
    experts=(
        stacked_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        # Experts under their names in transformers' model.
        stacked_experts("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)
_PHI_NORMS = {
    "head.norm.bias": TensorBlock("model.norm.bias"),
    "head.bias": TensorBlock("lm_head.bias"),
    **layer_rules({"attention_norm.bias": "input_layernorm.bias", "ffn_norm.bias": "post_attention_layernorm.bias"}),
}

SOFTMAX_FAMILIES = (
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        (
            *attention_fields(1e-5, 5e5, tie_embeddings=True),
            *allowed(use_bias=(False, None)),
            Constants({"rope.interleaved": True, "ffn.moe.router.softmax": "post", "ffn.moe.router.expert_bias": True}),
            ExpertLayerRange(),
            *renamed(
                intermediate_size="ffn.dense.intermediate_size",
                moe_num_experts=("ffn.moe.num_experts", 64),
                moe_k=("ffn.moe.top_k", 6),
                moe_intermediate_size="ffn.moe.intermediate_size",
            ),
            SharedExperts("moe_num_shared_experts", allows_none=True, default=2),
        ),
        layouts(
            # A matrix with one row.
            {
                "layers.{l}.ffn.router.expert_bias": TensorBlock(
                    "model.layers.{l}.mlp.moe_statics.e_score_correction_bias", dims=(1,)
                )
            }
        ),
        default_keys={"num_key_value_heads": 4},
    ),
    Family("granitemoe", "GraniteMoeForCausalLM", _GRANITE, _GRANITE_LAYOUTS),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        (*_GRANITE, *renamed(shared_intermediate_size=("ffn.moe.shared.intermediate_size", 0))),
        _GRANITE_LAYOUTS,
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        (
            *attention_fields(1e-5, 1e4),
            attention_bias(has_output=True),
            Constants(
                {
                    "attention.qk_norm": {},
                    "attention.qk_norm.after_rope": True,
                    "ffn.moe.router.softmax": "post",
                }
            ),
            *allowed(use_qk_norm=(True, None)),
            SameForAllLayers("num_experts", "ffn.moe.num_experts", 1),
            SameForAllLayers("moe_topk", "ffn.moe.top_k", 1),
            *renamed(intermediate_size="ffn.moe.intermediate_size"),
            HunyuanSharedExpert(),
        ),
        layouts(
            layer_rules(
                {
                    "attention.query_norm.weight": "self_attn.query_layernorm.weight",
                    "attention.key_norm.weight": "self_attn.key_layernorm.weight",
                    "ffn.router.weight": "mlp.gate.wg.weight",
                }
            ),
            ffn_rules("ffn.shared", "mlp.shared_mlp"),
        ),
    ),
    Family(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        (
            *attention_fields(1e-6, 5e5),
            attention_bias(has_output=True),
            Constants(
                {
                    "attention.qk_norm": {},
                    "attention.qk_norm.over": "all_heads",
                    "residual": "post",
                }
            ),
            num_experts("num_experts"),
            *renamed(num_experts_per_tok=("ffn.moe.top_k", 5), intermediate_size="ffn.moe.intermediate_size"),
            NormTopKProb(default=False),
        ),
        layouts(
            layer_rules(
                {
                    "attention_output_norm.weight": "post_attention_layernorm.weight",
                    "ffn_output_norm.weight": "post_feedforward_layernorm.weight",
                }
            )
        ),
    ),
)
"""Families in the order of trial of an export without --family."""
PHI_FAMILIES = (
    # Phi-3.5-MoE: LayerNorm, a SparseMixer router, LongRoPE and a bias of the output head.
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        (
            *attention_fields(1e-5, RopeParameters(1e6, has_mscale=True)),
            attention_bias(has_output=True),
            *renamed(
                lm_head_bias=("head_bias", False),
                intermediate_size="ffn.moe.intermediate_size",
                router_jitter_noise=("ffn.moe.router.softmax.jitter", 0.01),
            ),
            UniformWindow(),
            num_experts("num_local_experts"),
            # transformers ignores the key and chooses two experts.
            *allowed(num_experts_per_tok=(2,)),
            Constants({"norm": "layernorm", "ffn.moe.top_k": 2, "ffn.moe.router.softmax": "sparsemixer"}),
        ),
        mixtral_layouts(
            {"ffn.router.weight": "block_sparse_moe.gate.weight"},
            {"ffn.router.weight": "mlp.router.weight"},
            _PHI_NORMS,
        ),
        default_keys={"num_key_value_heads": 8},
    ),
)


_SIGMOID_ROUTER: tuple[ConfigField, ...] = (
    Constants({"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}),
    *allowed(scoring_func=("sigmoid", None)),
    *renamed(num_experts_per_tok="ffn.moe.top_k"),
)
_EXPERTS: tuple[ConfigField, ...] = (
    *_SIGMOID_ROUTER,
    num_experts("num_experts"),
    *renamed(intermediate_size="ffn.dense.intermediate_size", moe_intermediate_size="ffn.moe.intermediate_size"),
)
_GLM_EXPERTS: tuple[ConfigField, ...] = (
    *_SIGMOID_ROUTER,
    *renamed(
        n_routed_experts="ffn.moe.num_experts",
        moe_intermediate_size="ffn.moe.intermediate_size",
        routed_scaling_factor=("ffn.moe.router.scaling_factor", 1.0),
    ),
    RouterGroups(),
    *allowed(topk_method=("noaux_tc", None)),
)

SIGMOID_FAMILIES = (
    Family(
        "dots1",
        "Dots1ForCausalLM",
        (
            *attention_fields(1e-6, 1e4),
            attention_bias(has_output=True),
            Constants({"attention.qk_norm": {}}),
            SlidingWindowLayers(4096, last_layers_slide),
            FirstKDense(),
            *_GLM_EXPERTS,
            *renamed(
                intermediate_size="ffn.dense.intermediate_size", norm_topk_prob=("ffn.moe.router.normalize", False)
            ),
            SharedExperts(),
        ),
        layouts(),
        default_keys={"num_key_value_heads": 32},
    ),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        (
            *attention_fields(1e-5, 1e6, head_size=128),
            attention_bias(has_output=False),
            *allowed(use_qk_norm=(False, None), first_k_dense_replace=(0, None)),
            *_GLM_EXPERTS,
            *renamed(norm_topk_prob=("ffn.moe.router.normalize", True)),
            SharedExperts(default=1),
        ),
        layouts(),
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *attention_fields(1e-5, RopeParameters(1e4, fraction=0.5)),
            attention_bias(has_output=False),
            FirstKDense(default=1),
            *_GLM_EXPERTS,
            *renamed(
                use_qk_norm=("attention.qk_norm", False),
                intermediate_size="ffn.dense.intermediate_size",
                norm_topk_prob=("ffn.moe.router.normalize", True),
            ),
            SharedExperts(default=1),
            MTP_LAYERS,
        ),
        layouts(MTP),
        default_keys={"num_key_value_heads": 8},
        has_mtp=True,
        mtp_unreported=(46, 92),
    ),
    Family(
        "hy_v3",
        "HYV3ForCausalLM",
        (
            *attention_fields(1e-5, 11_158_840.0, head_size=128),
            attention_bias(has_output=True),
            *allowed(mlp_bias=(False, None)),
            Constants({"attention.qk_norm": {}}),
            MlpLayerTypes(default=1),
            *_EXPERTS,
            *renamed(
                initializer_range=("init_std", 0.006), router_scaling_factor=("ffn.moe.router.scaling_factor", 2.826)
            ),
            SharedExperts("num_shared_experts", default=1),
        ),
        layouts(
            layer_rules({"ffn.router.weight": "mlp.router.gate.weight", "ffn.router.expert_bias": "mlp.expert_bias"}),
            ffn_rules("ffn.shared", "mlp.shared_mlp"),
        ),
        renamed_modules={"shared_mlp": "shared_experts"},
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            *attention_fields(1e-6, RopeParameters(5e6, fraction=1.0, rotary_dim_key="rotary_dim"), head_size=128),
            Constants({"attention.qk_norm": {}, "attention.qk_norm.over": "all_heads"}),
            *allowed(use_qk_norm=(True, None), qk_norm_type=("per_layer", None)),
            num_experts("num_local_experts"),
            *renamed(intermediate_size="ffn.moe.intermediate_size"),
            *_SIGMOID_ROUTER,
            *allowed(use_routing_bias=(True, None), shared_intermediate_size=(0, None)),
        ),
        mixtral_layouts(
            {
                "ffn.router.weight": "block_sparse_moe.gate.weight",
                "ffn.router.expert_bias": "block_sparse_moe.e_score_correction_bias",
            },
            {"ffn.router.expert_bias": "mlp.e_score_correction_bias"},
        ),
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        (
            *attention_fields(1e-5, 1e4),
            Constants({"attention.qk_norm": {}}),
            SlidingWindowLayers(4096, EveryNthFull("sliding_window_pattern", 4), "nope with a window"),
            MlpLayerTypes(default=1),
            *_EXPERTS,
            *renamed(
                routed_scaling_factor=("ffn.moe.router.scaling_factor", 2.5),
                norm_topk_prob=("ffn.moe.router.normalize", True),
            ),
            RouterGroups(),
            SharedExperts("num_shared_experts", default=1),
        ),
        layouts(layer_rules({"ffn.router.expert_bias": "mlp.e_score_correction_bias"})),
        default_keys={"num_key_value_heads": 32},
    ),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        (
            *attention_fields(1e-5, 1e4, head_size=128),
            attention_bias(has_output=True),
            Constants({"attention.qk_norm": {}, "attention.gate": {}, "residual": "both"}),
            InputScaling(),
            SlidingWindowLayers(1024, EveryNthFull("global_attn_every_n_layers", 4), "nope"),
            FirstKDense("num_dense_layers", default=1),
            *_EXPERTS,
            *allowed(score_func=("sigmoid", None), route_norm=(True, None), n_group=(1, None), topk_group=(1, None)),
            *renamed(route_scale=("ffn.moe.router.scaling_factor", 1.0)),
            SharedExperts("num_shared_experts", default=2),
        ),
        layouts(
            layer_rules(
                {
                    "attention.wg": "self_attn.gate_proj.weight",
                    "attention_output_norm.weight": "post_attention_layernorm.weight",
                    "ffn_norm.weight": "pre_mlp_layernorm.weight",
                    "ffn_output_norm.weight": "post_mlp_layernorm.weight",
                    "ffn.router.weight": "mlp.router.gate.weight",
                    "ffn.router.expert_bias": "mlp.expert_bias",
                }
            )
        ),
    ),
)
"""Families in the order of trial of an export without --family."""


_CHUNKS = {"chunked_attention": "chunk", "full_attention": "full"}


@dataclass(frozen=True)
class ChunkedLayers:
    """`no_rope_layers`, `layer_types`, `attention_chunk_size`, `use_qk_norm` and the attention temperature.

    By default every `no_rope_layer_interval`-th layer has no RoPE, and the layers with RoPE attend within chunks. The
    layers with RoPE have norms of queries and keys, the other layers the attention temperature.
    """

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read the kinds of the layers, and the settings that depend on them."""
        mark_read(hf_config, "attention_chunk_size", "no_rope_layer_interval", "attn_scale", "floor_scale")
        mark_read(hf_config, "attn_temperature_tuning", "use_qk_norm")
        has_rope = _layers_with_rope(hf_config)
        words = _attention_words(hf_config, has_rope)
        settings: dict[str, Any] = {
            "layers.attention": words,
            "layers.position": ["rope" if value else "nope" for value in has_rope],
        }
        if "chunk" in words:
            settings |= Renamed("attention_chunk_size", "attention_chunk_size").read(hf_config)
        if _switch(hf_config, "use_qk_norm") and any(has_rope):
            settings |= {"attention.qk_norm.weight": False, "attention.qk_norm.after_rope": True}
            settings |= {"attention.qk_norm.in_nope": False} if not all(has_rope) else {}
        if _switch(hf_config, "attn_temperature_tuning") and not all(has_rope):
            scale = Renamed("attn_scale", "attention.temperature.scale", 0.1).read(hf_config)
            tokens = Renamed("floor_scale", "attention.temperature.tokens", 8192, minimum=1).read(hf_config)
            settings |= scale | tokens if "attention.temperature.scale" in scale else {}
        return settings

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the kind of every layer. Other options of norms and windows do not read back as the same model."""
        scale = setting_of(model, "attention.temperature.scale")
        keys: dict[str, Any] = {
            "no_rope_layers": [int(layer.attention.has_rope) for layer in model.decoder_layers],
            "layer_types": attention_types(model, _CHUNKS),
            "attention_chunk_size": model.attention_chunk_size or None,
            "use_qk_norm": setting_of(model, "attention.qk_norm") is not None,
            "attn_temperature_tuning": scale > 0,
        }
        if scale:
            keys |= {"attn_scale": scale, "floor_scale": setting_of(model, "attention.temperature.tokens")}
        return keys


def _switch(hf_config: Json, key: str) -> bool:
    """Return a switch of config.json, true if absent. Released folders also have numbers."""
    value = hf_config.get(key, True)
    if not isinstance(value, bool | int):
        raise ConfigError(f"config.json has {key}={value!r}, which should be true or false")
    return bool(value)


def _layers_with_rope(hf_config: Json) -> list[bool]:
    count = num_layers_of(hf_config)
    values = hf_config.get("no_rope_layers") or []
    if not values:
        interval = interval_of(hf_config, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(values, list) or len(values) < count or any(value not in (0, 1) for value in values):
        raise ConfigError(
            f"config.json has no_rope_layers={values!r}, which should be 0 or 1 for each of {count} layers"
        )
    return [bool(value) for value in values[:count]]


def _attention_words(hf_config: Json, has_rope: list[bool]) -> list[str]:
    """Return "chunk" for each layer that attends within chunks, "full" for other layers."""
    if hf_config.get("layer_types") is not None:
        return mapped_layer_types(hf_config, "layer_types", _CHUNKS)
    has_chunks = hf_config.get("attention_chunk_size") is not None
    return ["chunk" if rope and has_chunks else "full" for rope in has_rope]


@dataclass(frozen=True)
class InterleavedExperts:
    """`moe_layers`. Without it, every `interleave_moe_layer_step`-th layer has experts."""

    def read(self, hf_config: Json) -> dict[str, Any]:
        """Read which layers have experts."""
        count = num_layers_of(hf_config)
        numbers = hf_config.get("moe_layers")
        mark_read(hf_config, "interleave_moe_layer_step")
        if numbers is None:
            step = interval_of(hf_config, "interleave_moe_layer_step", 1)
            numbers = list(range(step - 1, count, step))
        if not isinstance(numbers, list) or not all(is_int(number) for number in numbers):
            raise ConfigError(f"config.json has moe_layers={numbers!r}, which should be a list of whole numbers")
        return {"layers.ffn": ["moe" if i in numbers else "dense" for i in range(count)]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the numbers of the layers with experts."""
        return {"moe_layers": [i for i, layer in enumerate(model.decoder_layers) if layer.ffn.is_routed]}


_TENSORS = {
    **ffn_rules("ffn", "feed_forward"),
    **ffn_rules("ffn.shared", "feed_forward.shared_expert"),
    **layer_rules({"ffn.router.weight": "feed_forward.router.weight"}),
    **untransposed_experts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
}

LLAMA4_FAMILIES = (
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        (
            *attention_fields(1e-5, 5e5),
            attention_bias(has_output=True),
            ChunkedLayers(),
            InterleavedExperts(),
            num_experts("num_local_experts"),
            *renamed(
                intermediate_size_mlp=("ffn.dense.intermediate_size", 16384), num_experts_per_tok=("ffn.moe.top_k", 1)
            ),
            Renamed(
                "intermediate_size", "ffn.moe.intermediate_size", 8192, copies=("ffn.moe.shared.intermediate_size",)
            ),
            Constants(
                {
                    "rope.interleaved": True,
                    "ffn.moe.router": "sigmoid",
                    "ffn.moe.router.normalize": False,
                    "ffn.moe.probs_on_input": True,
                }
            ),
        ),
        layouts(_TENSORS, experts=({},)),
        multimodal=MultimodalFolder("llama4", r"(vision_model|multi_modal_projector)\..*", {"language_model.": ""}),
        default_keys={"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "num_local_experts": 16},
    ),
)
"""Families in the order of trial of an export without --family."""
