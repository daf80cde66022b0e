"""Family flint: sinks in all layers, windows with RoPE, full attention without, a sigmoid router."""

from moefold.convert.families.config_fields import Constants, Renamed, attention_bias, num_experts, renamed
from moefold.convert.families.family import Family, attention_fields, ffn_rules, layer_rules, layouts
from moefold.convert.families.known_keys import Json
from moefold.convert.families.layer_fields import SlidingWindowLayers, SparseLayers


def _layer_types(hf_config: Json, count: int) -> list[str]:
    """Return full attention for the first two layers, every fourth from the second on, and the last layer."""
    full = {0, count - 1, *range(1, count, 4)}
    return ["full_attention" if i in full else "sliding_attention" for i in range(count)]


FAMILIES = (
    Family(
        "flint",
        "FlintForCausalLM",
        (
            *attention_fields(1e-6, 1e4, head_size=128),
            attention_bias(has_output=True),
            SlidingWindowLayers(513, _layer_types, "nope"),
            SparseLayers(default_dense=(0, 1)),
            num_experts("num_experts"),
            *renamed(
                intermediate_size="ffn.dense.intermediate_size",
                moe_intermediate_size="ffn.moe.intermediate_size",
                num_experts_per_tok="ffn.moe.top_k",
                norm_topk_prob=("ffn.moe.router.normalize", True),
            ),
            Renamed("shared_expert_intermediate_size", "ffn.moe.shared.intermediate_size", 1024, minimum=1),
            Constants({"attention.qk_norm": {}, "attention.sinks": True, "ffn.moe.router": "sigmoid"}),
        ),
        layouts(
            layer_rules({"attention.sinks": "self_attn.softmax_offset"}),
            ffn_rules("ffn.shared", "mlp.shared_expert"),
        ),
        default_keys={"num_key_value_heads": 4},
        renamed_modules={"softmax_offset": "sinks"},
        options={
            "num_hidden_layers": (4,),
            "layer_types": (None, ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]),
            "mlp_only_layers": (None, [], [1]),
        },
    ),
)
