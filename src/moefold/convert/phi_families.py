"""Family Phi-MoE (Phi-3.5-MoE): LayerNorm, a SparseMixer router, LongRoPE and a bias of the output head. Torch-free."""

from moefold.convert.config_fields import AllowedValues, AttentionBias, ConfigField, Constant, Renamed
from moefold.convert.family import (
    BACKBONE,
    BIASES,
    MIXTRAL_EXPERTS,
    STACKED_EXPERTS,
    Family,
    NumExperts,
    family_sizes,
    layer_rules,
    merge_rules,
)
from moefold.convert.layer_fields import UniformLayers, UniformWindow
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import RenamedTensor, TensorRule

_PHI_MOE: tuple[ConfigField, ...] = (
    *family_sizes(norm_eps=1e-5, rope_theta=1e6, rope=RopeParameters(1e6, has_mscale=True)),
    AttentionBias(has_output=True),
    Renamed("lm_head_bias", "head_bias", False),
    Constant("norm", "layernorm"),
    UniformLayers("M"),
    UniformWindow(),
    NumExperts("num_local_experts"),
    Renamed("intermediate_size", "moe_ffn_hidden_size"),
    # transformers chooses two experts whatever the key says.
    AllowedValues("num_experts_per_tok", (2,)),
    Constant("top_k", 2),
    Constant("router_softmax", "sparsemixer"),
    Renamed("router_jitter_noise", "sparsemixer_jitter", 0.01),
)
_TENSORS: dict[str, TensorRule] = {
    **BACKBONE,
    **BIASES,
    "head.norm.bias": RenamedTensor("model.norm.bias"),
    "head.bias": RenamedTensor("lm_head.bias"),
    **layer_rules({"attention_norm.bias": "input_layernorm.bias", "ffn_norm.bias": "post_attention_layernorm.bias"}),
}

PHI_FAMILIES = (
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        _PHI_MOE,
        (
            merge_rules(_TENSORS, layer_rules({"ffn.router.weight": "block_sparse_moe.gate.weight"}), MIXTRAL_EXPERTS),
            merge_rules(_TENSORS, layer_rules({"ffn.router.weight": "mlp.router.weight"}), STACKED_EXPERTS),
        ),
        default_keys={"num_key_value_heads": 8},
    ),
)
"""Families in the order in which an export without --family tries them."""
