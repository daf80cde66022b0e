"""Family lara_mini (Lara 4 Mini): Gated DeltaNet, windows with RoPE and full attention without."""

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import (
    Constants,
    NormTopKProb,
    Renamed,
    attention_bias,
    num_experts,
    renamed,
)
from moefold.convert.families.family import (
    EXPERTS,
    USUAL,
    Family,
    attention_fields,
    by_attention,
    ffn_rules,
    grouped,
    layer_rules,
    layouts,
)
from moefold.convert.families.known_keys import Json
from moefold.convert.families.layer_fields import SlidingWindowLayers
from moefold.convert.families.linear_families import DELTANET, deltanet_fields

_KINDS = {"linear_attention": "linear", "sliding_attention": "window", "full_attention": "full"}
_PARTS = [f"attention.w{x}" for x in "qkvgba"]


def _layer_types(hf_config: Json, count: int) -> list[str]:
    """Return the layer types of the released model, repeated for `count` layers."""
    linear, window, full = _KINDS
    return [(linear, window, linear, full, window)[i % 5] for i in range(count)]


def _rows(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return all queries, keys, values, output gates, write strengths and decays."""
    keys = model.linear_attention.num_key_heads * model.linear_attention.key_head_dim
    heads = model.linear_attention.num_value_heads
    values = heads * model.linear_attention.value_head_dim
    return 1, (keys, keys, values, values, heads, heads)


FAMILIES = (
    Family(
        "lara_mini",
        "LaraMiniForCausalLM",
        (
            *attention_fields(1e-6, 1e4, head_size=128, tie_embeddings=True),
            attention_bias(has_output=True),
            SlidingWindowLayers(512, _layer_types, "nope", _KINDS),
            *deltanet_fields(8, 16),
            num_experts("num_experts"),
            *renamed(num_experts_per_tok="ffn.moe.top_k", moe_intermediate_size="ffn.moe.intermediate_size"),
            NormTopKProb(default=True),
            Renamed("shared_expert_intermediate_size", "ffn.moe.shared.intermediate_size", 512, minimum=1),
            Constants({"attention.qk_norm": {}}),
        ),
        layouts(
            by_attention(
                DELTANET
                | grouped(_PARTS, "linear_attn.in_proj.weight", _rows)
                | layer_rules({"attention.norm.weight": "linear_attn.out_norm.weight"}),
                USUAL,
            ),
            ffn_rules("ffn.shared", "mlp.shared_expert"),
            experts=(EXPERTS[1],),
        ),
        default_keys={"num_key_value_heads": 4},
        renamed_modules={"out_norm": "norm"},
        options={
            "num_hidden_layers": (4,),
            "initializer_range": (0.1,),
            "layer_types": (None, ["full_attention", "linear_attention", "sliding_attention", "linear_attention"]),
        },
    ),
)
