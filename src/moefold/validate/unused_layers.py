"""Keys without effect in models without certain kinds of layers and experts."""

from collections.abc import Iterator

from moefold.config.groups.attention import AttentionPart
from moefold.config.model import ModelConfig, has_dense_layers
from moefold.validate.unused_rule import UnusedKeyRule


def has_nope(model: ModelConfig) -> bool:
    """Return whether a layer of softmax attention has no RoPE."""
    return not all(part.has_rope for part in _attentions(model))


def _attentions(model: ModelConfig) -> Iterator[AttentionPart]:
    return (layer.attention for layer in model.layers)


LAYER_RULES = (
    UnusedKeyRule(
        "model.attention.qk_norm.in_nope model.attention.temperature",
        lambda cfg: not has_nope(cfg.model),
        "no layer of model.rope_pattern is N",
        "choose a pattern with N",
    ),
    UnusedKeyRule(
        "model.linear_attention",
        lambda cfg: not cfg.model.has_linear_attention,
        "no layer of model.attention_pattern is L",
        "choose a pattern with L",
    ),
    UnusedKeyRule(
        "model.sliding_window",
        lambda cfg: not any(layer.window for layer in cfg.model.layers),
        "no layer of model.attention_pattern is W",
        "choose a pattern with W",
    ),
    UnusedKeyRule(
        "model.attention_chunk_size",
        lambda cfg: not any(layer.chunk for layer in cfg.model.layers),
        "no layer of model.attention_pattern is C",
        "choose a pattern with C",
    ),
    UnusedKeyRule(
        "model.attention model.rope model.rope_pattern",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.attention_pattern are L, without softmax attention",
        "choose a pattern with F",
    ),
    UnusedKeyRule(
        "model.rope model.attention.rope_fraction model.attention.qk_norm.after_rope",
        lambda cfg: not cfg.model.has_rope,
        "no layer of kind F or W of model.attention_pattern is R in model.rope_pattern",
        "choose patterns with such a layer",
    ),
    UnusedKeyRule(
        "model.ffn.dense",
        lambda cfg: not has_dense_layers(cfg.model),
        "no layer of model.layer_pattern is D",
        "choose a pattern with D, or set model.ffn.moe.intermediate_size, the width of an expert",
    ),
)
