"""Kinds and keys that have moved to the distribution `moefold-experiments`: what to install and to write instead."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

EXPERIMENTS = MappingProxyType(
    {
        "optimizer": ("delayed_adamw", "delayed_muon", "spsa"),
        "site_method": ("co2", "noloco", "sparseloco", "spes"),
    }
)
"""Kinds of the distribution, by group."""


class MovedKey(NamedTuple):
    """Recipe key of an earlier version that is a setting of a part now."""

    default: Any
    """Value that has no effect: configs that were recorded by an earlier version have it."""
    instead: str
    """What a recipe writes now."""


MOVED_KEYS = MappingProxyType(
    {
        "train.spsa_eps": MovedKey(1e-3, 'train.optimizer={kind="spsa", eps=...}'),
        "train.spsa_max_gradient": MovedKey(10.0, 'train.optimizer={kind="spsa", max_gradient=...}'),
        "train.gradient_delay": MovedKey(0, "train.optimizer=delayed_adamw, or delayed_muon"),
        "train.delay_correction": MovedKey(0.0, 'train.optimizer={kind="delayed_adamw", correction=...}'),
    }
)


def missing_experiment(name: str, group: str, kind: str) -> str:
    """Return the refusal of a kind of `moefold-experiments`, which is not installed; empty for another kind.

    Args:
        name: recipe key, as "section.key".
        group: the group of the part.
        kind: its value.
    """
    if kind not in EXPERIMENTS.get(group, ()):
        return ""
    return (
        f"{name}={kind!r} is a part of moefold-experiments, which is not installed; pip install moefold-experiments, "
        "or in a checkout pip install ./experiments"
    )


def moved_key(name: str) -> str:
    """Return the refusal of a key that has moved, with what to write instead; empty for another key."""
    found = MOVED_KEYS.get(name)
    return f"{name} is now a setting of a part of moefold-experiments; write {found.instead}" if found else ""


def without_moved_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe without keys that have moved and have no effect."""
    found = dict(tree)
    for name, moved in MOVED_KEYS.items():
        section, _, key = name.partition(".")
        keys = found.get(section)
        if isinstance(keys, dict) and keys.get(key, ...) == moved.default:
            found[section] = {other: value for other, value in keys.items() if other != key}
    return found
