"""Spellings of keys of config.json: transformers reads some keys under two names."""

from collections.abc import Collection, Mapping
from typing import Any

from moefold.convert.families.known_keys import declared_keys
from moefold.errors import ConfigError


def with_all_spellings(hf_config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return config.json with each key under both spellings that transformers reads. Refuses two different values."""
    keys = dict(hf_config)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        if keys.get(alias) is None:
            continue
        if keys.get(name, keys[alias]) not in (keys[alias], None):
            raise ConfigError(
                f"config.json has {alias}={keys[alias]!r} and {name}={keys[name]!r}, two spellings of one key; remove "
                "the wrong one"
            )
        keys[name] = keys[alias]
    return keys


def spellings_of(names: Collection[str], family: str) -> set[str]:
    """Return keys with their other spellings."""
    found = set(names)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        found |= {alias} if name in found else set()
    return found
