"""Keys without effect in models without linear attention, or without any other."""

from moefold.validate.unused_rule import UnusedKeyRule

LINEAR_ATTENTION_RULES = (
    UnusedKeyRule(
        "model.linear_attention model.linear_num_key_heads model.linear_num_value_heads model.linear_key_head_dim "
        "model.linear_value_head_dim model.linear_conv_kernel",
        lambda cfg: not cfg.model.has_linear_attention,
        "no layer of model.attention_pattern is L",
        "choose a pattern with L",
    ),
    UnusedKeyRule(
        "model.attention model.num_query_groups model.head_dim model.qk_norm model.qkv_bias "
        "model.attention_output_bias model.attention_sinks model.attention_gate model.attention_scale model.rope_theta "
        "model.rope_fraction model.rope_scaling model.rope_interleaved model.rope_pattern model.nope_temperature_scale",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.attention_pattern are L, without softmax attention",
        "choose a pattern with F",
    ),
)
