"""Recipes of format 1, whose parts read flat keys of their section, in the keys of format 2. Torch-free."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from moefold.config.find import built_in_kinds, find_part
from moefold.config.part import Part, settings_of
from moefold.config.part_table import toml_table
from moefold.config.suggestions import default_of, join_with_or, part_keys
from moefold.errors import ConfigError

FORMAT = 2
"""Format of recipes and checkpoints that this version writes; it reads older ones."""
FORMAT_KEY = "format"
"""Key above the sections of a recipe with its format."""
KIND = "kind"


class Moved(NamedTuple):
    """Place of a flat key of format 1: a setting of the part that another key chooses."""

    key: str
    """As "section.key"."""
    setting: str
    """`KIND`: where the value is on, another kind stands for it, which has the old one in its name."""
    kinds: tuple[str, ...] = ()
    """Kinds that read it; empty: the built-in ones that have the setting."""

    def __str__(self) -> str:
        """Return the path, as an override has it."""
        return f"{self.key}.{self.setting}"


MOVED = {
    "train.min_lr": Moved("train.lr_schedule", "min_lr"),
    "train.decay_steps": Moved("train.lr_schedule", "decay_steps"),
    "train.weight_decay": Moved("train.optimizer", "weight_decay", ("adamw", "muon", "spsa")),
    "train.beta1": Moved("train.optimizer", "beta1"),
    "train.beta2": Moved("train.optimizer", "beta2"),
    "train.eps": Moved("train.optimizer", "eps"),
    "train.moment_dtype": Moved("train.optimizer", "moment_dtype"),
    "train.muon_groups": Moved("train.optimizer", "groups"),
    "train.muon_momentum": Moved("train.optimizer", "momentum"),
    "train.muon_ns_steps": Moved("train.optimizer", "ns_steps"),
    "train.spsa_eps": Moved("train.optimizer", "eps", ("spsa",)),
    "train.spsa_max_gradient": Moved("train.optimizer", "max_gradient", ("spsa",)),
    "train.gradient_delay": Moved("train.optimizer", KIND, ("delayed_adamw", "delayed_muon")),
    "train.delay_correction": Moved("train.optimizer", "correction", ("delayed_adamw", "delayed_muon")),
    "align.reward": Moved("align.method", "reward"),
    "align.threshold": Moved("align.method", "threshold"),
    "align.beta": Moved("align.method", "beta"),
    "align.weight_cap": Moved("align.method", "weight_cap"),
    "align.template": Moved("align.method", "template"),
    "align.want": Moved("align.method", "want"),
    "align.gamma": Moved("align.method", "gamma"),
    "align.desirable_weight": Moved("align.method", "desirable_weight"),
    "align.undesirable_weight": Moved("align.method", "undesirable_weight"),
    "moe.sinkhorn_iterations": Moved("moe.choice", "iterations"),
    "moe.skew": Moved("moe.choice", "share"),
    "moe.llep_threshold": Moved("parallel.dispatcher", "threshold"),
    "moe.llep_capacity": Moved("parallel.dispatcher", "capacity"),
    "moe.llep_min_tokens": Moved("parallel.dispatcher", "min_tokens"),
    "parallel.receive_factor": Moved("parallel.dispatcher", "receive_factor"),
    "parallel.schedule_csv": Moved("parallel.schedule", "path"),
    "parallel.placement": Moved("parallel.context", "placement"),
    "parallel.attention_hosts": Moved("parallel.context", "hosts"),
    "parallel.attention_tolerance": Moved("parallel.context", "tolerance"),
    "parallel.attention_pool": Moved("parallel.context", "pool"),
    "parallel.attention_block": Moved("parallel.context", "block"),
    "rl.clip_low": Moved("rl.objective", "clip_low"),
    "rl.clip_high": Moved("rl.objective", "clip_high"),
    "rl.correction_low": Moved("rl.correction", "low"),
    "rl.correction_high": Moved("rl.correction", "high"),
    "sites.topology": Moved("sites.method", KIND, ("noloco",)),
    "sites.experts": Moved("sites.method", KIND, ("spes",)),
    "sites.density": Moved("sites.method", "density", ("sparseloco",)),
    "sites.values": Moved("sites.method", "bits", ("sparseloco",)),
    "sites.penalty": Moved("sites.method", "penalty", ("co2",)),
    "sites.clip": Moved("sites.method", "clip", ("co2",)),
    "sites.merge_experts": Moved("sites.method", "merge_experts", ("spes",)),
    "sites.merge_every": Moved("sites.method", "merge_every", ("spes",)),
    "sites.merge_until": Moved("sites.method", "merge_until", ("spes",)),
}
"""Place of each flat key of format 1, as "section.key"."""
SITE_METHODS = {
    "topology": ("all", "noloco"),
    "experts": ("average", "spes"),
    "density": (1.0, "sparseloco"),
    "penalty": (False, "co2"),
    "clip": (0.0, "co2"),
}
"""Keys of [sites] that did what a method does now: their default, and the method that another value needs."""


def check_format(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a recipe without its format.

    Args:
        tree: what a file has.
        name: the file, as the message names it.

    Raises:
        ConfigError: the format is newer than this version of moefold.
    """
    found = tree.get(FORMAT_KEY, FORMAT)
    if type(found) is not int or not 1 <= found <= FORMAT:
        raise ConfigError(f"{name} has format {found!r}, and this version of moefold reads up to {FORMAT}; update it")
    return {key: value for key, value in tree.items() if key != FORMAT_KEY}


def upgraded(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a recipe of format 1 in format 2, and the flat keys that its parts do not read.

    Args:
        tree: sections, unchecked; sections of format 2 stay as they are.
    """
    found = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in tree.items()}
    if isinstance(sites := found.get("sites"), dict):
        method = sites.get("method", "")
        kind = method.get(KIND) if isinstance(method, dict) else method
        of_keys = [other for key, (off, other) in SITE_METHODS.items() if sites.get(key, off) != off]
        if of_keys and kind not in of_keys:
            sites["method"] = of_keys[0]
    unread = []
    for name, place in MOVED.items():
        section, _, key = name.partition(".")
        keys = found.get(section)
        if not isinstance(keys, dict) or key not in keys:
            continue
        value = keys.pop(key)
        owner, _, chooser = place.key.partition(".")
        keys = found.setdefault(owner, {})
        table = keys.get(chooser, kind_by_default(place.key)) if isinstance(keys, dict) else None
        table = {"kind": table} if isinstance(table, str) else table
        if place.setting == KIND and value and isinstance(table, dict):
            kind = table.get(KIND)
            keys[chooser] = {**table, KIND: next((one for one in place.kinds if one.endswith(f"_{kind}")), kind)}
        elif place.setting == KIND or not isinstance(table, dict) or table.get(KIND) not in _kinds_of(place):
            unread.append(name)
        else:
            keys[chooser] = {**table, place.setting: value}
    return found, unread


def upgraded_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key" of format 1 in format 2, as `upgraded` does."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return {f"{section}.{key}": value for section, keys in upgraded(tree)[0].items() for key, value in keys.items()}


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key", with a part as its kind and its settings by "section.key.setting".

    Args:
        values: values of `keys_of` by "section.key".
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "kind" in value:
            found |= {name: value["kind"]} | {f"{name}.{key}": entry for key, entry in value.items() if key != "kind"}
        else:
            found[name] = value
    return found


def moved_key_refusal(tree: Mapping[str, Any], name: str) -> str:
    """Return the refusal of a flat key of format 1 in a recipe, with the table that it belongs to.

    Args:
        tree: the sections of the recipe, unchecked.
        name: a key of MOVED.
    """
    place = MOVED[name]
    section, _, key = place.key.partition(".")
    found, unread = upgraded(tree)
    if name in unread:
        value = found.get(section, {}).get(key, kind_by_default(place.key))
        kind = value.get("kind") if isinstance(value, dict) else value
        kinds = join_with_or(list(map(repr, _kinds_of(place))))
        return f"{name} is {place} now, a key of {kinds}, and not of {kind!r}; leave it out"
    table = toml_table(found[section][key])
    return f"{name} is {place} now: write {place.key} = {table}, or run moefold recipe upgrade FILE"


def moved_override_refusal(name: str, text: str) -> str:
    """Return the refusal of an override of a flat key of format 1.

    Args:
        name: a key of MOVED.
        text: its value, as the command line has it.
    """
    place = MOVED[name]
    word = f"{place.key}={join_with_or(list(place.kinds))}" if place.setting == KIND else f"{place}={text}"
    return f"{name} is {place} now: write {word}"


def upgraded_word(word: str, tree: Mapping[str, Any]) -> str:
    """Return an override `section.key=value` in format 2; one that has not moved stays.

    Args:
        word: the override.
        tree: the sections of the recipe that it is for, unchecked.

    Raises:
        ConfigError: the word is no override, or the part that the recipe chooses does not read its key.
    """
    name, equals, text = word.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{word!r} is no setting; settings are section.key=value, such as train.lr=1e-3")
    if name not in MOVED:
        return word
    keys = tree.get(section)
    tree = {**tree, section: {**(keys if isinstance(keys, dict) else {}), key: text}}
    if name in upgraded(tree)[1]:
        raise ConfigError(moved_key_refusal(tree, name))
    if MOVED[name].setting == KIND:
        raise ConfigError(moved_override_refusal(name, text))
    return f"{MOVED[name]}={text}"


def kind_by_default(key: str) -> str:
    """Return the kind of the part that a key chooses in a recipe that sets nothing."""
    default = default_of(*key.split("."))
    return default.kind if isinstance(default, Part) else str(default)


def _kinds_of(place: Moved) -> tuple[str, ...]:
    """Return the kinds that have a setting, and read it from its flat key; no others read flat keys."""
    group = part_keys()[place.key]
    return place.kinds or tuple(
        kind for kind in built_in_kinds(group) if place.setting in settings_of(find_part(group, kind))
    )
