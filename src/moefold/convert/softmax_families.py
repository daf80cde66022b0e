"""Further families with grouped-query attention and a softmax router. Torch-free."""

from moefold.convert.config_fields import (
    AllowedValues,
    AttentionBias,
    AttentionMultiplier,
    ConfigField,
    Constant,
    HunyuanSharedExpert,
    NormTopKProb,
    Renamed,
    SameForAllLayers,
    SharedExperts,
)
from moefold.convert.family import (
    BACKBONE,
    BIASES,
    DENSE_FFN,
    HEAD_NORMS,
    PER_EXPERT,
    ROUTER,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    TensorRules,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.layer_fields import ExpertLayerRange, UniformLayers
from moefold.convert.tensor_mapping import FusedRows, RowVector, StackedExperts, TensorRule


def _layouts(*tables: TensorRules) -> tuple[TensorRules, ...]:
    shared = (BACKBONE, BIASES, HEAD_NORMS, DENSE_FFN, ROUTER, SHARED_EXPERTS)
    return tuple(merge_rules(*shared, experts, *tables) for experts in (PER_EXPERT, STACKED_EXPERTS))


_GRANITE: tuple[ConfigField, ...] = (
    *family_sizes(norm_eps=1e-6, rope_theta=1e4),
    AttentionBias(has_output=True),
    AttentionMultiplier(),
    Renamed("embedding_multiplier", "embedding_multiplier", 1.0),
    Renamed("residual_multiplier", "residual_multiplier", 1.0),
    Renamed("logits_scaling", "logits_divisor", 1.0),
    UniformLayers("M"),
    Renamed("num_local_experts", "num_experts", 8),
    Renamed("num_experts_per_tok", "top_k", 2),
    Renamed("intermediate_size", "moe_ffn_hidden_size"),
    Constant("router_softmax", "post"),
)
_MOE = "model.layers.{l}.block_sparse_moe"
_SHARED = "model.layers.{l}.shared_mlp"
_GRANITE_TENSORS: dict[str, TensorRule] = {
    **BACKBONE,
    **BIASES,
    **layer_rules({"ffn.router.weight": "block_sparse_moe.router.layer.weight"}),
    "layers.{l}.ffn.experts.w_gate": StackedExperts(f"{_MOE}.input_linear.weight", 0),
    "layers.{l}.ffn.experts.w_up": StackedExperts(f"{_MOE}.input_linear.weight", 1),
    "layers.{l}.ffn.experts.w_down": StackedExperts(f"{_MOE}.output_linear.weight"),
}
_GRANITE_SHARED: dict[str, TensorRule] = {
    "layers.{l}.ffn.shared.w_gate": FusedRows(f"{_SHARED}.input_linear.weight", 0),
    "layers.{l}.ffn.shared.w_up": FusedRows(f"{_SHARED}.input_linear.weight", 1),
    **layer_rules({"ffn.shared.w_down": "shared_mlp.output_linear.weight"}),
}
_GRANITE_STACKED: dict[str, TensorRule] = {
    "layers.{l}.ffn.experts.w_gate": StackedExperts(f"{_MOE}.experts.gate_up_proj", 0),
    "layers.{l}.ffn.experts.w_up": StackedExperts(f"{_MOE}.experts.gate_up_proj", 1),
    "layers.{l}.ffn.experts.w_down": StackedExperts(f"{_MOE}.experts.down_proj"),
}
"""Experts under the names that they have in transformers' model."""
_GRANITE_LAYOUTS = (_GRANITE_TENSORS, merge_rules(_GRANITE_TENSORS, _GRANITE_STACKED))

SOFTMAX_FAMILIES = (
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=5e5, tie_embeddings=True),
            AllowedValues("use_bias", (False, None)),
            Constant("rope_interleaved", True),
            ExpertLayerRange(),
            Renamed("intermediate_size", "ffn_hidden_size"),
            Renamed("moe_num_experts", "num_experts", 64),
            Renamed("moe_k", "top_k", 6),
            Renamed("moe_intermediate_size", "moe_ffn_hidden_size"),
            SharedExperts("moe_num_shared_experts", allows_none=True, default=2),
            Constant("router_softmax", "post"),
            Constant("expert_bias", True),
        ),
        _layouts(
            {"layers.{l}.ffn.router.expert_bias": RowVector("model.layers.{l}.mlp.moe_statics.e_score_correction_bias")}
        ),
        default_keys={"num_key_value_heads": 4},
    ),
    Family("granitemoe", "GraniteMoeForCausalLM", _GRANITE, _GRANITE_LAYOUTS),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        (*_GRANITE, Renamed("shared_intermediate_size", "shared_expert_ffn_hidden_size", 0)),
        tuple(merge_rules(layout, _GRANITE_SHARED) for layout in _GRANITE_LAYOUTS),
    ),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        (
            *family_sizes(norm_eps=1e-5, rope_theta=1e4),
            AttentionBias(has_output=True),
            Constant("qk_norm", True),
            Constant("qk_norm_after_rope", True),
            AllowedValues("use_qk_norm", (True, None)),
            UniformLayers("M"),
            SameForAllLayers("num_experts", "num_experts", 1),
            SameForAllLayers("moe_topk", "top_k", 1),
            Renamed("intermediate_size", "moe_ffn_hidden_size"),
            HunyuanSharedExpert(),
            Constant("router_softmax", "post"),
        ),
        _layouts(
            layer_rules(
                {
                    "attention.query_norm.weight": "self_attn.query_layernorm.weight",
                    "attention.key_norm.weight": "self_attn.key_layernorm.weight",
                    "ffn.router.weight": "mlp.gate.wg.weight",
                    **{f"ffn.shared.w_{x}": f"mlp.shared_mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
                }
            )
        ),
    ),
    Family(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        (
            *family_sizes(norm_eps=1e-6, rope_theta=5e5),
            AttentionBias(has_output=True),
            Constant("qk_norm", True),
            Constant("qk_norm_width", "all_heads"),
            Constant("norm_placement", "post"),
            UniformLayers("M"),
            NumExperts("num_experts"),
            Renamed("num_experts_per_tok", "top_k", 5),
            Renamed("intermediate_size", "moe_ffn_hidden_size"),
            NormTopKProb(default=False),
        ),
        _layouts(
            layer_rules(
                {
                    "attention_output_norm.weight": "post_attention_layernorm.weight",
                    "ffn_output_norm.weight": "post_feedforward_layernorm.weight",
                }
            )
        ),
    ),
)
"""Families in the order in which an export without --family tries them."""
