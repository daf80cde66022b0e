"""Small recipes of each built-in kind, which is found by its file, and of each of its settings that is on or off."""

from collections.abc import Callable, Iterator

from moefold.config.base.part import Part, default_of_field
from moefold.config.base.part_registry import built_in_kinds, find_group, find_part
from moefold.config.chosen import chosen
from moefold.config.edit import edit
from moefold.config.keys.paths import default_of, kind_settings, part_keys
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.validate.config import check_config
from moefold.validate.unused import idle_keys
from tests.verify.recipes import tiny

Settings = dict[str, dict[str, object]]
"""Keys of a recipe by section."""

OF_LAYERS = ("attention", "ffn", "indexer", "norm", "residual", "span")
"""Groups with a part in each layer."""
LINEAR_SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 4, "value_head_dim": 6}
SIZES: dict[str, dict[str, object]] = {
    "mla": {
        "q_lora_rank": 5,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    },
    "gated_deltanet": LINEAR_SIZES | {"conv_kernel": 3},
    "kda": LINEAR_SIZES | {"conv_kernel": 3},
    "gla": LINEAR_SIZES | {"gate_rank": 3},
    "short_convolution": {"conv_kernel": 3},
}
"""Sizes of the kinds of layers."""
FACTOR = {"rope.scaling.factor": 4.0}
CONTEXT = FACTOR | {"rope.scaling.original_seq_len": 8}
INDEXER = {"attention.indexer.top_k": 3, "attention.indexer.num_heads": 3, "attention.indexer.head_dim": 6}
NEEDS: dict[tuple[str, str], Settings] = {
    ("choice", "quantile"): {"model": {"ffn.moe.router.expert_bias": True}},
    ("drop", "position"): {"moe": {"capacity_factor": 0.75}},
    ("drop", "probs"): {"moe": {"capacity_factor": 0.75}},
    ("drop_scope", "sub_sequence"): {"moe": {"capacity_factor": 0.75}},
    ("drop_scope", "full_sequence"): {"moe": {"capacity_factor": 0.75}},
    ("indexer", "lightning"): {"model": INDEXER},
    ("indexer", "shared"): {"model": INDEXER | {"layers.selection": "own, shared"}},
    ("rope_scaling", "linear"): {"model": FACTOR},
    ("rope_scaling", "llama3"): {"model": CONTEXT},
    ("rope_scaling", "longrope"): {
        "model": CONTEXT | {"rope.scaling.short_factors": (1.0, 1.5), "rope.scaling.long_factors": (2.0, 3.0)}
    },
    ("rope_scaling", "ntk"): {"model": FACTOR},
    ("rope_scaling", "yarn"): {"model": CONTEXT},
    ("router_softmax", "sparsemixer"): {"model": {"ffn.moe.router.softmax.jitter": 0.6}, "moe": {"choice": "topk"}},
}
"""Further settings that a kind needs besides the key that chooses it."""
ON = {int: 4, float: 0.5}
"""Value of a number that is 0 by default, by its type."""
ON_BY_KEY = {"train.lr_schedule.min_lr": 1e-5, "train.lr_schedule.decay_steps": 3}
"""Value of a number that is 0 by default and has its own limit."""
OTHER_WIDTH = {"head": "all_heads", "dim": "head"}
"""Other value of the widths of norms and gates."""
TABLES = ("gate", "qk_norm", "temperature", "shared")
"""Tables that a part may have, all of whose settings have defaults."""


def kinds_of(groups: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the built-in kinds of some groups."""
    return [(group, kind) for group in groups for kind in built_in_kinds(group)]


def settings(group: str, kind: str) -> Settings:
    """Return the settings of a recipe with a kind."""
    found: Settings = {"model": {"sliding_window": 5, "attention_chunk_size": 5}}
    if group == "attention":
        key = "linear_attention" if find_part(group, kind).is_recurrent else "attention"
        found["model"] |= {key: kind} | {f"{key}.{name}": value for name, value in SIZES.get(kind, {}).items()}
        found["model"] |= {"layers.attention": "linear, full"} if key == "linear_attention" else {}
    elif group == "ffn":
        found["model"]["layers.ffn"] = {"swiglu": "dense", "moe": "moe"}[kind]
    elif group == "span":
        found["model"]["layers.attention"] = kind
    elif group != "indexer":
        section, _, key = find_group(group).key.partition(".")
        found.setdefault(section, {})[key] = kind
    return merged(found, NEEDS.get((group, kind), {}))


def merged(first: Settings, second: Settings) -> Settings:
    """Return the settings of both."""
    return {section: first.get(section, {}) | second.get(section, {}) for section in first | second}


def recipes(group: str, kind: str, make: Callable[..., Config] = tiny) -> Iterator[Config]:
    """Yield recipes with a kind: with its other settings as they are, and with each on or off setting switched.

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
    for name, found in switched(group, kind):
        try:
            cfg = _made(make, found)
        except ConfigError:
            continue
        if has_kind(cfg, group, kind) and name not in idle_keys(cfg):
            yield cfg


def _made(make: Callable[..., Config], found: Settings) -> Config:
    """Return the recipe of some settings; the keys of parts outside the model, as train.loss.z_loss, are set last."""
    early = {section: dict(keys) for section, keys in found.items()}
    late = {}
    for section in early.keys() - {"model"}:
        for key in [key for key in early[section] if "." in key]:
            late[f"{section}.{key}"] = early[section].pop(key)
    cfg = make(**early)
    if late:
        cfg = edit(cfg, late)
        check_config(cfg)
    return cfg


def has_kind(cfg: Config, group: str, kind: str) -> bool:
    """Return whether a recipe has a part of this kind."""
    parts = [part for layer in cfg.model.all_layers for part in layer.parts()]
    if group not in OF_LAYERS:
        parts.append(chosen(cfg, find_group(group)))
    return any(isinstance(part, Part) and (part.group, part.kind) == (group, kind) for part in parts)


def switched(group: str, kind: str) -> Iterator[tuple[str, Settings]]:
    """Yield settings with one switched, and its key."""
    base = settings(group, kind)
    part = find_part(group, kind)
    for path, owners in kind_settings().items():
        table = path.rpartition(".")[0]
        if part_keys().get(table) == group and kind in owners and path not in part_keys():
            default = default_of_field(part, path.rpartition(".")[2])
            if path.rpartition(".")[2] in TABLES:
                with_table = merged(base, _settings_at(path, {}))
                yield path, with_table
                for inner in (inner for inner in kind_settings() if inner.startswith(f"{path}.")):
                    yield from _with_switched(with_table, inner, default_of(*inner.split(".", 1)))
            else:
                yield from _with_switched(base, path, default)


def _settings_at(path: str, value: object) -> Settings:
    section, _, key = path.partition(".")
    return {section: {key: value}}


def _with_switched(base: Settings, path: str, default: object) -> Iterator[tuple[str, Settings]]:
    section, _, key = path.partition(".")
    for value in _switched_values(default, is_given=key in base.get(section, {})):
        yield path, merged(base, _settings_at(path, ON_BY_KEY.get(path, value)))


def _switched_values(default: object, *, is_given: bool) -> Iterator[object]:
    if isinstance(default, bool):
        yield not default
    elif default == 0 and type(default) in ON:
        yield 0 if is_given else ON[type(default)]
    elif default in OTHER_WIDTH:
        yield OTHER_WIDTH[default]
