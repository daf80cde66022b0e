"""Apply overrides `section.key=value` to the tree of a recipe.

The tree is validated afterwards, so that both have the same errors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from moefold.config.base.aliases import key_hint
from moefold.config.base.layer_words import counted_layers
from moefold.config.base.part import NONE
from moefold.config.keys.paths import annotation_at, group_at, key_types, paths_with, sections
from moefold.config.keys.suggestions import explain_unknown_section
from moefold.config.tables.part_class import resolve_kind_path, settings_of_other_kind
from moefold.config.tables.toml_text import brief_value
from moefold.config.tables.tree import Tree, merged, parsed_value, put
from moefold.errors import ConfigError, raise_all

AUTO_MAPPING = "auto"
"""Value of `parallel = "auto"` at the top level, short for parallel.mapping = "auto"."""
MAX_NAME_CHARACTERS = 200
"""Maximum length of the name in an override, because messages repeat it. All keys are much shorter."""


def apply_overrides(tree: Tree, overrides: Sequence[str], folder: Path = Path()) -> list[str]:
    """Apply overrides `section.key=value` to a tree of sections, in order. `parallel=auto` is allowed as in recipes.

    The settings of a part, `section.key.setting=value`, are applied after all others: its kind may precede or follow
    them. Another kind keeps the settings of the recipe that both kinds have. The last value of a key counts.

    Args:
        folder: the recipe's folder, for relative paths of parts.

    Returns:
        Messages on settings that another kind lacks, and on keys that are given twice.

    Raises:
        ConfigError: overrides have another form, or name an unknown section or a key of format 1. One error has all.
    """
    left_out = []
    refused = []
    for override in sorted(overrides, key=_depth):
        try:
            left_out.append(_apply_override(tree, override, folder))
        except ConfigError as error:
            refused.append(error)
    raise_all(refused)
    return [message for message in left_out if message] + _replaced_values(overrides)


def _replaced_values(overrides: Sequence[str]) -> list[str]:
    """Return a message on each key whose value a later override replaces."""
    messages = []
    values: dict[str, str] = {}
    for override in overrides:
        key, value = (word.strip() for word in override.split("=", 1))
        if values.get(key, value) != value:
            last, before = (brief_value(parsed_value(text)) for text in (value, values[key]))
            messages.append(f"{key}={last} replaces {before}, given before it")
        values[key] = value
    return messages


def _depth(override: str) -> int:
    """Return the number of tables around the setting of an override."""
    return override.partition("=")[0].count(".")


def _parse_override(override: str, tree: Tree) -> tuple[str, str, str]:
    """Split an override into section, key and text, and refuse a name that no recipe has."""
    name, equals, text = override.partition("=")
    if (name.strip(), text.strip()) == ("parallel", AUTO_MAPPING):
        name = "parallel.mapping"
    section, dot, key = name.strip().partition(".")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(
            f"override {brief_value(override)} names no key; overrides are section.key=value, such as train.lr=1e-3"
        )
    if not equals:
        raise ConfigError(
            f"{brief_value(override)} is not an override; overrides are section.key=value, such as train.lr=1e-3"
        )
    if not dot or not key:
        word = override if len(override) <= MAX_NAME_CHARACTERS else name.strip()
        paths = [path.removesuffix(section) + word for path in paths_with(section)]
        hint = f"; did you mean {' or '.join(paths)}?" if paths else ""
        if not paths and (ours := key_hint(section)):
            hint = f"; {ours}"
        raise ConfigError(
            f"override {brief_value(override)} names no section{hint or '; overrides are section.key=value'}"
        )
    if section in sections() and key not in key_types(section):
        _refuse_moved_key(name.strip(), text.strip(), tree)
    if section not in sections():
        hint = key_hint(name)
        reason = f"unknown key {name.strip()}; {hint}" if hint else explain_unknown_section(section)
        raise ConfigError(f"override {brief_value(override)}: {reason}")
    return section, key, text.strip()


def _refuse_moved_key(name: str, text: str, tree: Tree) -> None:
    """Raise ConfigError for an override of a key of earlier versions."""
    from moefold.config.upgrade.moved_keys import MOVED
    from moefold.config.upgrade.refusals import moved_override_refusal

    if name in MOVED:
        raise ConfigError(moved_override_refusal(name, text, tree))


def _apply_override(tree: Tree, override: str, folder: Path) -> str:
    """Apply one override, and return a message on dropped settings, or ""."""
    section, key, text = _parse_override(override, tree)
    path = f"{section}.{key}"
    keys = tree.setdefault(section, {})
    # A recipe with `run = 3` is refused by the validation that follows.
    if not isinstance(keys, dict):
        return ""
    owner, dot, _ = key.partition(".")
    is_setting = bool(dot) and annotation_at(f"{section}.{owner}") is not None
    value = parsed_value(text) if is_setting else _override_value(section, key, text)
    if group_at(path) is not None:
        value = resolve_kind_path(value, folder)
    if path == "model.layers" and key in keys and type(value) is int:
        value = counted_layers(keys[key], value)
    dropped = _merge_override(tree, [section, *(key.split(".") if is_setting else [key])], value)
    left_out = ", ".join(f"{path}.{name}={brief_value(dropped[name])}" for name in dropped)
    return f"{path}={value!r} leaves out {left_out} of the recipe, which it has no key for" if dropped else ""


def _merge_override(tree: Tree, names: list[str], value: Any) -> Tree:
    """Put the value of an override into a recipe, with the settings that it keeps, and return the settings left out."""
    path = ".".join(names)
    before: Any = tree
    for name in names:
        before = before.get(name) if isinstance(before, dict) else None
    is_kind = group_at(path) is not None
    if is_kind and isinstance(value, str) and value != NONE and isinstance(before, dict):
        carried, dropped = settings_of_other_kind(path, before, value)
        put(tree, names, NONE)
        put(tree, names, {"kind": value, **carried} if carried else value)
        return dropped
    if isinstance(value, dict):
        # A table is completed by the kind and the settings of the recipe, like the keys of a preset.
        kind = value.get("kind")
        if is_kind and isinstance(before, dict) and isinstance(kind, str) and kind != before.get("kind"):
            before = {"kind": kind, **settings_of_other_kind(path, before, kind)[0]}
        value = merged(path, before, value)
        put(tree, names, NONE)
    put(tree, names, value)
    return {}


def _override_value(section: str, key: str, text: str) -> Any:
    value = parsed_value(text)
    types = get_args(key_types(section).get(key)) or (key_types(section).get(key),)
    takes_text = str in types and not (type(value) is int and int in types)
    takes_table = annotation_at(f"{section}.{key}") is not None
    return value if not takes_text or isinstance(value, str | list | (dict if takes_table else str)) else text
