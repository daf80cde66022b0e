"""Further families with grouped-query attention and a softmax router. Torch-free."""

from moefold.convert.config_fields import (
    AttentionMultiplier,
    ConfigField,
    Constants,
    HunyuanSharedExpert,
    NormTopKProb,
    SameForAllLayers,
    SharedExperts,
    allowed,
    attention_bias,
    num_experts,
    renamed,
)
from moefold.convert.family import (
    Family,
    attention_fields,
    ffn_rules,
    fused,
    layer_rules,
    layouts,
    mixtral_layouts,
    stacked_experts,
)
from moefold.convert.layer_fields import ExpertLayerRange, UniformWindow
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import TensorBlock

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
        # Under the names that they have in transformers' model.
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
            # A matrix of one row.
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
"""Families in the order in which an export without --family tries them."""
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
            # transformers chooses two experts whatever the key says.
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
