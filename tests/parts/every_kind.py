"""Small recipes of each built-in kind, which is found by its file, and of each of its settings that is on or off."""

from collections.abc import Callable, Iterator
from dataclasses import fields

from moefold.config.chosen import chosen
from moefold.config.find import built_in_kinds, find_group, find_part
from moefold.config.groups.attention import OutputGate, QueryKeyNorm
from moefold.config.layers import FEED_FORWARD_KINDS, SPANS
from moefold.config.part import Part, flat_keys, flat_keys_of, make_part
from moefold.config.schema import Config
from moefold.config.suggestions import default_of, kind_settings, part_keys
from moefold.errors import ConfigError
from moefold.validate.unused import idle_keys
from tests.verify.recipes import tiny

Settings = dict[str, dict[str, object]]
"""Keys of a recipe by section."""

OF_LAYERS = ("attention", "ffn", "indexer", "norm", "residual", "span")
"""Groups of which each layer has a part."""
SIZES = {
    "q_lora_rank": 5, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_conv_kernel": 3, "linear_gate_rank": 3, "sliding_window": 5, "attention_chunk_size": 5, "index_heads": 3,
    "index_head_dim": 6,
}  # fmt: skip
"""Sizes of the kinds of layers."""
CONTEXT = {"rope_scaling_factor": 4.0, "rope_original_seq_len": 8}
NEEDS: dict[tuple[str, str], Settings] = {
    ("choice", "quantile"): {"model": {"expert_bias": True}},
    ("drop", "position"): {"moe": {"capacity_factor": 0.75}},
    ("drop", "probs"): {"moe": {"capacity_factor": 0.75}},
    ("drop_scope", "sub_sequence"): {"moe": {"capacity_factor": 0.75}},
    ("drop_scope", "full_sequence"): {"moe": {"capacity_factor": 0.75}},
    ("indexer", "lightning"): {"model": {"index_topk": 3}},
    ("indexer", "shared"): {"model": {"index_topk": 3, "index_pattern": "FS"}},
    ("rope_scaling", "linear"): {"model": CONTEXT},
    ("rope_scaling", "llama3"): {"model": CONTEXT},
    ("rope_scaling", "longrope"): {
        "model": CONTEXT | {"rope_short_factors": (1.0, 1.5), "rope_long_factors": (2.0, 3.0)}
    },
    ("rope_scaling", "ntk"): {"model": CONTEXT},
    ("rope_scaling", "yarn"): {"model": CONTEXT},
    ("router_softmax", "sparsemixer"): {"model": {"sparsemixer_jitter": 0.6}, "moe": {"choice": "topk"}},
}
"""What a kind needs besides the key that chooses it."""
ON = {int: 4, float: 0.5}
"""Value of a number that is 0 by default, by its type."""
OTHER_WIDTH = {"head": "all_heads", "dim": "head"}
"""Other value of the widths of norms and gates."""


def kinds_of(groups: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the built-in kinds of some groups."""
    return [(group, kind) for group in groups for kind in built_in_kinds(group)]


def settings(group: str, kind: str) -> Settings:
    """Return the settings of a recipe with a kind."""
    found: Settings = {"model": dict(SIZES)}
    if group == "attention" and find_part(group, kind).is_recurrent:
        found["model"] |= {"attention_pattern": "LF", "linear_attention": kind}
    elif group in ("ffn", "span"):
        letters = {word: letter for letter, word in (FEED_FORWARD_KINDS | SPANS).items()}
        found["model"]["layer_pattern" if group == "ffn" else "attention_pattern"] = letters[kind]
    elif group != "indexer":
        section, key = find_group(group).key.split(".")
        found.setdefault(section, {})[key] = kind
    return merged(found, NEEDS.get((group, kind), {}))


def merged(first: Settings, second: Settings) -> Settings:
    """Return the settings of both."""
    return {section: first.get(section, {}) | second.get(section, {}) for section in first | second}


def recipes(group: str, kind: str, make: Callable[..., Config] = tiny) -> Iterator[Config]:
    """Yield recipes with a kind: with its other settings as they are, and with each that can be on or off switched.

    These are truth values, and numbers whose default 0 means "none". A recipe that is not legal, in which the setting
    has no effect, or which then lacks the kind, is left out.

    Args:
        group: the group.
        kind: a built-in kind.
        make: makes a legal recipe of settings.
    """
    cfg = make(**settings(group, kind))
    assert has_kind(cfg, group, kind)
    yield cfg
    for name, found in _switched(group, kind):
        try:
            cfg = make(**found)
        except ConfigError:
            continue
        if has_kind(cfg, group, kind) and name not in idle_keys(cfg):
            yield cfg


def has_kind(cfg: Config, group: str, kind: str) -> bool:
    """Return whether a recipe has a part of this kind."""
    parts = [part for layer in cfg.model.all_layers for part in layer.parts()]
    if group not in OF_LAYERS:
        parts.append(chosen(cfg, find_group(group)))
    return any(isinstance(part, Part) and (part.group, part.kind) == (group, kind) for part in parts)


def _switched(group: str, kind: str) -> Iterator[tuple[str, Settings]]:
    """Yield settings with one switched, and its key."""
    base = settings(group, kind)
    part = find_part(group, kind)
    for name in (name for _, name in flat_keys(group, kind) if isinstance(name, str)):
        yield from _with_switched(base, name)
    for path, owners in kind_settings().items():
        section, key, setting = path.split(".")
        if part_keys()[f"{section}.{key}"] == group and kind in owners:
            default = next(field.default for field in fields(part) if field.name == setting)
            for value in _switched_values(default, is_given=False):
                yield path, merged(base, {section: {key: make_part(group, kind, **{setting: value})}})
    for field, nested, key in (("gate", OutputGate, "attention_gate"), ("qk_norm", QueryKeyNorm, "qk_norm")):
        if field in part.__dataclass_fields__:
            with_nested = merged(base, {"model": {key: True}})
            yield f"model.{key}", with_nested
            for _, name in flat_keys_of(nested):
                yield from _with_switched(with_nested, name)


def _with_switched(base: Settings, name: str) -> Iterator[tuple[str, Settings]]:
    section, key = name.split(".")
    for value in _switched_values(default_of(section, key), is_given=key in base.get(section, {})):
        yield name, merged(base, {section: {key: value}})


def _switched_values(default: object, *, is_given: bool) -> Iterator[object]:
    if isinstance(default, bool):
        yield not default
    elif default == 0 and type(default) in ON:
        yield 0 if is_given else ON[type(default)]
    elif default in OTHER_WIDTH:
        yield OTHER_WIDTH[default]
