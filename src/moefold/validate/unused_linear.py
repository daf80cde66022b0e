"""Keys without effect in models without linear attention, without any other, or with one of its kinds."""

from moefold.config.schema import Config
from moefold.validate.unused_rule import UnusedKeyRule


def _has_kind(cfg: Config, *kinds: str) -> bool:
    """Return whether the model has layers of kind L of one of these kinds."""
    return cfg.model.has_linear_attention and cfg.model.linear_attention in kinds


LINEAR_ATTENTION_RULES = (
    UnusedKeyRule(
        "model.attention_gate_width",
        lambda cfg: not cfg.model.attention_gate,
        "model.attention_gate=false",
        "set model.attention_gate=true",
    ),
    UnusedKeyRule(
        "model.linear_attention model.linear_num_key_heads model.linear_num_value_heads model.linear_key_head_dim "
        "model.linear_value_head_dim model.linear_conv_kernel model.linear_gate_rank model.linear_full_rank_gates "
        "model.linear_decay_bound model.linear_conv_bias",
        lambda cfg: not cfg.model.has_linear_attention,
        "no layer of model.attention_pattern is L",
        "choose a pattern with L",
    ),
    UnusedKeyRule(
        "model.linear_num_key_heads model.linear_num_value_heads model.linear_key_head_dim model.linear_value_head_dim",
        lambda cfg: _has_kind(cfg, "short_convolution"),
        "model.linear_attention='short_convolution' has no heads",
        "choose another model.linear_attention",
    ),
    UnusedKeyRule(
        "model.linear_conv_kernel",
        lambda cfg: _has_kind(cfg, "gla"),
        "model.linear_attention='gla' has no convolution",
        "choose another model.linear_attention",
    ),
    UnusedKeyRule(
        "model.linear_conv_bias",
        lambda cfg: _has_kind(cfg, "gated_deltanet", "kda", "gla"),
        "only model.linear_attention='short_convolution' has it",
        "choose 'short_convolution'",
    ),
    UnusedKeyRule(
        "model.linear_gate_rank",
        lambda cfg: _has_kind(cfg, "gated_deltanet", "kda", "short_convolution"),
        "only model.linear_attention='gla' has it",
        "choose 'gla'",
    ),
    UnusedKeyRule(
        "model.linear_full_rank_gates model.linear_decay_bound",
        lambda cfg: _has_kind(cfg, "gated_deltanet", "gla", "short_convolution"),
        "only model.linear_attention='kda' has them",
        "choose 'kda'",
    ),
    UnusedKeyRule(
        "model.attention model.num_attention_heads model.num_query_groups model.head_dim model.qk_norm "
        "model.qkv_bias model.qk_norm_width model.qk_norm_weight model.qk_norm_nope model.qk_norm_after_rope "
        "model.attention_gate_width model.attention_output_bias model.attention_sinks model.attention_gate "
        "model.attention_scale model.rope_theta model.rope_fraction model.rope_scaling model.rope_interleaved "
        "model.rope_pattern model.nope_temperature_scale",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.attention_pattern are L, without softmax attention",
        "choose a pattern with F",
    ),
)
