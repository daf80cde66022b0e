"""Keys without effect in models without certain kinds of layers and experts."""

from collections.abc import Iterator

from moefold.config.groups.attention import AttentionPart, SoftmaxAttentionPart
from moefold.config.model import ModelConfig
from moefold.validate.unused_rule import UnusedKeyRule


def has_nope(model: ModelConfig) -> bool:
    """Return whether a layer of softmax attention has no RoPE."""
    return not all(part.has_rope for part in _attentions(model))


def _attentions(model: ModelConfig) -> Iterator[AttentionPart]:
    return (layer.attention for layer in model.layers)


LAYER_RULES = (
    UnusedKeyRule(
        "model.attention.qk_norm model.attention.gate",
        lambda cfg: not isinstance(cfg.model.softmax_attention, SoftmaxAttentionPart),
        "model.attention is of another package, which has keys of its own",
        "choose model.attention='gqa'",
    ),
    UnusedKeyRule(
        "model.attention.qk_norm.in_nope",
        lambda cfg: not cfg.model.attention.qk_norm or not has_nope(cfg.model),
        "there is no norm of queries and keys (model.attention.qk_norm), or no layer of model.rope_pattern is N",
        "set model.attention.qk_norm={}, and choose a pattern with N",
    ),
    UnusedKeyRule(
        "model.attention.temperature.scale",
        lambda cfg: not has_nope(cfg.model) or not any(part.has_temperature for part in _attentions(cfg.model)),
        "no layer of model.rope_pattern is N, or model.attention='mla' has no temperature",
        "choose a pattern with N and model.attention='gqa'",
    ),
    UnusedKeyRule(
        "model.linear_attention",
        lambda cfg: not cfg.model.has_linear_attention,
        "no layer of model.attention_pattern is L",
        "choose a pattern with L",
    ),
    UnusedKeyRule(
        "model.attention model.attention.qk_norm model.attention.gate model.rope.theta model.rope.scaling "
        "model.rope.interleaved model.rope_pattern model.attention.temperature.scale",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.attention_pattern are L, without softmax attention",
        "choose a pattern with F",
    ),
    UnusedKeyRule(
        "model.rope.theta model.attention.rope_fraction model.rope.interleaved model.rope.scaling model.attention.qk_norm.after_rope",
        lambda cfg: not cfg.model.has_rope,
        "no layer of kind F or W of model.attention_pattern is R in model.rope_pattern",
        "choose patterns with such a layer",
    ),
)
