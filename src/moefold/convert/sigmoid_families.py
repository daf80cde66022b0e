"""Families with grouped-query attention and DeepSeek-V3's router: sigmoid scores and an expert bias. Torch-free."""

from moefold.convert.config_fields import (
    AllowedValues,
    AttentionBias,
    ConfigField,
    Constant,
    InputScaling,
    MTPLayers,
    Renamed,
    RouterGroups,
    SharedExperts,
)
from moefold.convert.family import (
    BACKBONE,
    BIASES,
    DENSE_FFN,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    MTP,
    PER_EXPERT,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    TensorRules,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.layer_fields import (
    EveryNthFull,
    FirstKDense,
    MlpLayerTypes,
    SlidingWindowLayers,
    UniformLayers,
    last_layers_slide,
)
from moefold.convert.rope_fields import RopeParameters

_SIGMOID_ROUTER: tuple[ConfigField, ...] = (
    Constant("router_score", "sigmoid"),
    Constant("expert_bias", True),
    AllowedValues("scoring_func", ("sigmoid", None)),
    Renamed("num_experts_per_tok", "top_k"),
)
_GLM_EXPERTS: tuple[ConfigField, ...] = (
    *_SIGMOID_ROUTER,
    Renamed("n_routed_experts", "num_experts"),
    Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
    Renamed("routed_scaling_factor", "router_scaling_factor", 1.0),
    RouterGroups(),
    AllowedValues("topk_method", ("noaux_tc", None)),
)


def _layouts(*tables: TensorRules) -> tuple[TensorRules, ...]:
    shared = (BACKBONE, BIASES, HEAD_NORMS, DENSE_FFN, ROUTER, ROUTER_BIAS, SHARED_EXPERTS)
    return tuple(merge_rules(*shared, experts, *tables) for experts in (PER_EXPERT, STACKED_EXPERTS))


SIGMOID_FAMILIES = (
    Family(
        "dots1",
        "Dots1ForCausalLM",
        (
            *family_sizes(norm_eps=1e-6, rope_theta=1e4),
            AttentionBias(has_output=True),
            Constant("qk_norm", True),
            SlidingWindowLayers(4096, last_layers_slide),
            FirstKDense(),
            Renamed("intermediate_size", "ffn_hidden_size"),
            *_GLM_EXPERTS,
            Renamed("norm_topk_prob", "router_normalize", False),
            SharedExperts(),
        ),
        _layouts(),
        default_keys={"num_key_value_heads": 32},
    ),
    Family(
        "solar_open",
        "SolarOpenForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=1e6, head_size=128),
            AttentionBias(has_output=False),
            AllowedValues("use_qk_norm", (False, None)),
            AllowedValues("first_k_dense_replace", (0, None)),
            UniformLayers("M"),
            *_GLM_EXPERTS,
            Renamed("norm_topk_prob", "router_normalize", True),
            SharedExperts(default=1),
        ),
        _layouts(),
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=1e4, rope=RopeParameters(1e4, fraction=0.5)),
            AttentionBias(has_output=False),
            Renamed("use_qk_norm", "qk_norm", False),
            FirstKDense(default=1),
            Renamed("intermediate_size", "ffn_hidden_size"),
            *_GLM_EXPERTS,
            Renamed("norm_topk_prob", "router_normalize", True),
            SharedExperts(default=1),
            MTPLayers(),
        ),
        _layouts(MTP),
        default_keys={"num_key_value_heads": 8},
        has_mtp=True,
        mtp_unreported=(46, 92),
    ),
    Family(
        "hy_v3",
        "HYV3ForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=11_158_840.0, head_size=128),
            Renamed("initializer_range", "init_std", 0.006),
            AttentionBias(has_output=True),
            AllowedValues("mlp_bias", (False, None)),
            Constant("qk_norm", True),
            MlpLayerTypes(default=1),
            Renamed("intermediate_size", "ffn_hidden_size"),
            *_SIGMOID_ROUTER,
            NumExperts("num_experts"),
            Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
            Renamed("router_scaling_factor", "router_scaling_factor", 2.826),
            SharedExperts("num_shared_experts", default=1),
        ),
        _layouts(
            layer_rules(
                {
                    "ffn.router.weight": "mlp.router.gate.weight",
                    "ffn.router.expert_bias": "mlp.expert_bias",
                    **{f"ffn.shared.w_{x}": f"mlp.shared_mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
                }
            )
        ),
        renamed_modules={"shared_mlp": "shared_experts"},
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            *family_sizes(
                norm_eps=1e-6,
                rope_theta=5e6,
                head_size=128,
                rope=RopeParameters(5e6, fraction=1.0, rotary_dim_key="rotary_dim"),
            ),
            Constant("qk_norm", True),
            Constant("qk_norm_width", "all_heads"),
            AllowedValues("use_qk_norm", (True, None)),
            AllowedValues("qk_norm_type", ("per_layer", None)),
            UniformLayers("M"),
            NumExperts("num_local_experts"),
            Renamed("intermediate_size", "moe_ffn_hidden_size"),
            *_SIGMOID_ROUTER,
            AllowedValues("use_routing_bias", (True, None)),
            AllowedValues("shared_intermediate_size", (0, None)),
        ),
        (
            merge_rules(
                BACKBONE,
                HEAD_NORMS,
                layer_rules(
                    {
                        "ffn.router.weight": "block_sparse_moe.gate.weight",
                        "ffn.router.expert_bias": "block_sparse_moe.e_score_correction_bias",
                    }
                ),
                MIXTRAL_EXPERTS,
            ),
            merge_rules(
                BACKBONE,
                HEAD_NORMS,
                ROUTER,
                layer_rules({"ffn.router.expert_bias": "mlp.e_score_correction_bias"}),
                STACKED_EXPERTS,
            ),
        ),
        default_keys={"num_key_value_heads": 8},
    ),
    Family(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=1e4),
            Constant("qk_norm", True),
            SlidingWindowLayers(4096, EveryNthFull("sliding_window_pattern", 4), "nope with a window"),
            MlpLayerTypes(default=1),
            Renamed("intermediate_size", "ffn_hidden_size"),
            *_SIGMOID_ROUTER,
            NumExperts("num_experts"),
            Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
            Renamed("routed_scaling_factor", "router_scaling_factor", 2.5),
            RouterGroups(),
            Renamed("norm_topk_prob", "router_normalize", True),
            SharedExperts("num_shared_experts", default=1),
        ),
        _layouts(layer_rules({"ffn.router.expert_bias": "mlp.e_score_correction_bias"})),
        default_keys={"num_key_value_heads": 32},
    ),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=1e4, head_size=128),
            AttentionBias(has_output=True),
            Constant("qk_norm", True),
            Constant("attention_gate", True),
            Constant("norm_placement", "both"),
            InputScaling(),
            SlidingWindowLayers(1024, EveryNthFull("global_attn_every_n_layers", 4), "nope"),
            FirstKDense("num_dense_layers", default=1),
            Renamed("intermediate_size", "ffn_hidden_size"),
            *_SIGMOID_ROUTER,
            AllowedValues("score_func", ("sigmoid", None)),
            AllowedValues("route_norm", (True, None)),
            AllowedValues("n_group", (1, None)),
            AllowedValues("topk_group", (1, None)),
            NumExperts("num_experts"),
            Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
            Renamed("route_scale", "router_scaling_factor", 1.0),
            SharedExperts("num_shared_experts", default=2),
        ),
        _layouts(
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
"""Families in the order in which an export without --family tries them."""
