"""Help on every recipe key, read from the schema, for `--keys` and the page of keys."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Any

from moefold.config.base.aliases import key_hint
from moefold.config.base.part import NONE, Table, required_settings, settings_of
from moefold.config.base.part_registry import kind_of
from moefold.config.keys.learning_rates import LR_KEY, rates_text
from moefold.config.keys.paths import (
    default_of,
    key_types,
    kind_settings,
    last_name,
    owner_of,
    owners_of,
    part_annotations,
    part_keys,
    sections,
    tables,
)
from moefold.config.keys.suggestions import describe_key
from moefold.config.presets import preset_names, preset_summary
from moefold.errors import ConfigError
from moefold.message_text import Setting, closest_match, join_with_or


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """One recipe key: "section.key" or "section.key.setting", description of its type, default as TOML, and help."""

    name: str
    type: str
    default: str
    """Default as TOML, or empty if the key is required."""
    help: str
    kinds: tuple[str, ...] = ()
    """Built-in kinds with this setting, for a setting of a part."""
    choices: tuple[tuple[str, str], ...] = ()
    """Built-in kinds that the key may name, each with the docstring of its class, for a key that chooses a part."""


def recipe_keys(section: str) -> tuple[RecipeKey, ...]:
    """Return the keys of one section, in schema order."""
    help_texts = _field_help(sections()[section])
    keys: list[RecipeKey] = []
    for key in key_types(section):
        name = f"{section}.{key}"
        default = _shown_default(default_of(section, key))
        help_text = help_texts[key]
        if name == LR_KEY:
            default, help_text = "by method", f"{help_text} {rates_text()}"
        keys += [
            RecipeKey(name, describe_key(section, key), default, help_text, choices=_choices_of(name)),
            *_settings_of_kinds(name),
        ]
    return tuple(keys)


def _settings_of_kinds(name: str) -> Iterator[RecipeKey]:
    """Yield the settings of the table of a key, and of the tables in it, or nothing if the key takes no table."""
    for path, owners in kind_settings().items():
        if path.startswith(f"{name}."):
            section, _, key = path.partition(".")
            is_required = last_name(key) in required_settings(owner_of(path))
            default = "" if is_required else _shown_default(default_of(section, key))
            yield RecipeKey(path, describe_key(section, key), default, _help_of_table(path), owners, _choices_of(path))


def _choices_of(path: str) -> tuple[tuple[str, str], ...]:
    """Return the kinds that a key may name, each with the docstring of its class, or nothing if it chooses no part."""
    annotation = part_annotations().get(path)
    classes = annotation.classes() if annotation else ()
    return tuple((kind_of(part), " ".join((part.__doc__ or "").split())) for part in classes)


def _shown_default(value: Any) -> str:
    """Return a default as TOML, and a table only by its name, because its keys are also listed."""
    match value:
        case None:
            return json.dumps(NONE)
        case Table():
            return "{}"
        case _:
            return json.dumps(value, default=str)


def _help_of_table(path: str) -> str:
    """Return the help of a setting, separately for each kind if it differs between kinds."""
    table, _, setting = path.rpartition(".")
    owners: dict[str, list[str]] = {}
    for owner in owners_of(tables()[table]):
        if setting in settings_of(owner):
            kind = kind_of(owner) if table in part_keys() else ""
            owners.setdefault(_help_of_setting(owner, setting), []).append(kind)
    if len(owners) == 1:
        return next(iter(owners))
    return " ".join(f"{', '.join(names)}: {text[:1].lower()}{text[1:]}" for text, names in owners.items())


def _help_of_setting(part: type, setting: str) -> str:
    """Return the docstring under a field of a part, in its class or in the base class that defines it."""
    owner = next(base for base in part.__mro__ if setting in vars(base).get("__annotations__", {}))
    return _field_help(owner).get(setting, "")


def section_help(section: str) -> str:
    """Return the help of a section: the docstring of its dataclass."""
    return (sections()[section].__doc__ or "").strip()


def keys_text(pattern: str = "") -> str:
    """Return the keys with type, default and help, formatted for a terminal.

    Args:
        pattern: part of a key's name, or a pattern of the whole name with * and ?. Case is ignored. If no name matches,
            the help texts are searched. "" stands for all keys, and the presets.

    Raises:
        ConfigError: no key matches.
    """
    lines: list[str] = []
    matches = _matching_keys(pattern)
    for section in sections():
        keys = [key for key in recipe_keys(section) if key.name in matches]
        lines += [f"[{section}]  {_without_links(section_help(section))}", ""] if keys else []
        for key in keys:
            kinds = f", of {join_with_or(list(map(repr, key.kinds)))}" if key.kinds else ""
            lines.append(f"  {key.name} = {key.default or 'VALUE'}    ({key.type}{kinds})")
            lines.append(f"      {_without_links(key.help)}")
            lines += [f"        {kind}: {_without_links(text)}" for kind, text in key.choices]
        lines += [""] if keys else []
    if pattern:
        return "\n".join(lines)
    lines += ["Presets (model.preset):", ""]
    lines += [f"  {name}\n      {preset_summary(name)}" for name in preset_names()]
    return "\n".join(lines) + "\n"


def _matching_keys(pattern: str) -> set[str]:
    """Return the names of the keys whose name, or else whose help, matches a pattern."""
    keys = {
        key.name: " ".join([key.help, *(text for choice in key.choices for text in choice)])
        for section in sections()
        for key in recipe_keys(section)
    }
    lowered = pattern.lower()
    if any(char in lowered for char in "*?["):
        matches = {name for name in keys if fnmatchcase(name, lowered) or fnmatchcase(name.partition(".")[2], lowered)}
    else:
        matches = {name for name in keys if lowered in name}
        matches = matches or {name for name, text in keys.items() if lowered in text.lower()}
    if matches:
        return matches
    guess = closest_match(lowered, [*keys, *(name.partition(".")[2] for name in keys)])
    hint = key_hint(pattern) or (f"did you mean {guess!r}?" if guess else "`moefold train --keys` lists all")
    raise ConfigError(f"{Setting('--keys', pattern)}: no key has it in its name or help; {hint}")


def _without_links(markdown: str) -> str:
    """Replace Markdown links for a terminal: a documentation page by its path, any other link by its address."""
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", lambda link: link[1] if ":" in link[1] else f"docs/{link[1]}", markdown)


@cache
def _field_help(section: type) -> dict[str, str]:
    """Return the docstring under each field of a section's dataclass, read from its source."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
