"""Families with grouped-query attention and DeepSeek-V3's router: sigmoid scores and an expert bias. Torch-free."""

from moefold.convert.config_fields import (
    MTP_LAYERS,
    ConfigField,
    Constants,
    InputScaling,
    RouterGroups,
    SharedExperts,
    allowed,
    attention_bias,
    num_experts,
    renamed,
)
from moefold.convert.family import MTP, Family, attention_fields, ffn_rules, layer_rules, layouts, mixtral_layouts
from moefold.convert.layer_fields import (
    EveryNthFull,
    FirstKDense,
    MlpLayerTypes,
    SlidingWindowLayers,
    last_layers_slide,
)
from moefold.convert.rope_fields import RopeParameters

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
"""Families in the order in which an export without --family tries them."""
