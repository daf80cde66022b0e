"""Keys without effect in models without certain kinds of layers and experts."""

from collections.abc import Callable

from moefold.config.schema import Config
from moefold.validate.unused_rule import UnusedKeyRule


def _has_no(word: str) -> Callable[[Config], bool]:
    return lambda cfg: all(word not in words for words in cfg.model.layer_words)


LAYER_RULES = (
    *(
        UnusedKeyRule(keys, _has_no(word), f"no layer of model.layers is {word!r}", f"name {word!r} in model.layers")
        for word, keys in {
            "nope": "model.attention.qk_norm.in_nope model.attention.temperature",
            "linear": "model.linear_attention",
            "window": "model.sliding_window",
            "chunk": "model.attention_chunk_size",
        }.items()
    ),
    UnusedKeyRule(
        "model.attention model.rope",
        lambda cfg: not cfg.model.has_softmax_attention,
        "all layers of model.layers are 'linear', without softmax attention",
        "name 'full' in model.layers",
    ),
    UnusedKeyRule(
        "model.rope model.attention.rope_fraction model.attention.qk_norm.after_rope",
        lambda cfg: not cfg.model.has_rope,
        "no layer of softmax attention in model.layers has RoPE",
        "name a layer without 'nope'",
    ),
    UnusedKeyRule(
        "model.ffn.dense",
        _has_no("dense"),
        "no layer of model.layers is 'dense'",
        "name 'dense' in model.layers, or set model.ffn.moe.intermediate_size, the width of an expert",
    ),
)
