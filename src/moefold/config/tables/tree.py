"""Trees of settings: nested tables, as parsed from TOML."""

from collections.abc import Mapping, Sequence
from typing import Any

from moefold.bounded_read import parse_toml
from moefold.config.base.part import NONE, SOURCE, as_plain
from moefold.config.keys.paths import annotation_at, group_at, sections
from moefold.config.tables.part_class import settings_of_other_kind
from moefold.errors import ConfigError

Tree = dict[str, Any]


def nested(tree: Mapping[str, Any]) -> Tree:
    """Return a tree with keys "key.setting" moved to the table of "key". The last value of a setting wins.

    A text becomes the kind of its table.
    """
    result: Tree = {}
    for section, keys in tree.items():
        if not isinstance(keys, dict):
            result[section] = keys
            continue
        result[section] = {}
        for key, value in keys.items():
            is_setting = annotation_at(f"{section}.{key.partition('.')[0]}") is not None
            put(result, [section, *(key.split(".") if is_setting else [key])], value)
    return result


def put(tree: Tree, names: Sequence[str], value: Any) -> None:
    """Set a value in a tree by its path. A text on the path becomes the kind of its table.

    Raises:
        ConfigError: a table on the path is "none", or is a text although it has no kinds.
    """
    *owners, last = names
    for depth, name in enumerate(owners, 1):
        inner = as_plain(tree.get(name, {}))
        path = ".".join(owners[:depth])
        if inner == NONE or (isinstance(inner, str) and isinstance(annotation_at(path), type)):
            raise ConfigError(f"{path}={inner} has no keys; leave it or {'.'.join(names)} out")
        tree[name] = dict(inner) if isinstance(inner, dict) else {"kind": inner}
        tree = tree[name]
    before = tree.get(last)
    if isinstance(before, dict) and isinstance(value, str) and value != NONE:
        value = value if isinstance(annotation_at(".".join(names)), type) else {"kind": value}
    tree[last] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value


def merged(path: str, base: Any, over: Any) -> Any:
    """Return a table completed from another table, by only the keys that both have if the kinds differ.

    Args:
        path: path of the table, such as "model.attention".
        base: the other table, a kind, or another value.
        over: the table, a kind, or another value, which takes precedence.
    """
    if not isinstance(base, dict) or (annotation_at(path) is None and path not in sections()):
        return {"kind": base, **over} if isinstance(base, str) and isinstance(over, dict) and base != NONE else over
    if isinstance(over, str) and over != NONE:
        over = over if isinstance(annotation_at(path), type) else {"kind": over}
    if not isinstance(over, dict):
        return over
    kind = over.get("kind")
    if isinstance(kind, str) and group_at(path) and kind != base.get("kind"):
        base = settings_of_other_kind(path, base, kind, over.get(SOURCE, {}))[0]
    common = {key: merged(f"{path}.{key}", base[key], over[key]) for key in over if key in base}
    return {**base, **over, **common}


def parsed_value(text: str) -> Any:
    """Return a value of a command line, in TOML or as plain text."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    # Multi-line text could define additional keys: keep it as plain text.
    return parsed["value"] if len(parsed) == 1 else text
