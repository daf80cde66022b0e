"""Build a validated, frozen `Config` from a TOML recipe and `section.key=value` overrides, and convert it to JSON.

Overrides edit the recipe's tree before validation, so that there is one path and one set of errors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from moefold.bounded_read import parse_toml
from moefold.config.aliases import key_hint, our_value
from moefold.config.bounds import max_magnitude
from moefold.config.find import find_part, kinds_in_words, unknown_kind
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.limits import is_oversized, value_unsupported_reason
from moefold.config.method_defaults import default_learning_rate, method_settings
from moefold.config.outside import MissingPartError
from moefold.config.part import Part
from moefold.config.part_table import build_part, is_part_value, settings_of_other_kind, shown_value
from moefold.config.presets import load_preset
from moefold.config.schema import Config
from moefold.config.suggestions import (
    choices_of,
    closest_match,
    default_of,
    describe_key,
    explain_unknown_key,
    explain_unknown_section,
    key_types,
    part_keys,
    paths_with,
    sections,
)
from moefold.config.upgrade import (
    FORMAT_KEY,
    MOVED,
    check_format,
    kind_by_default,
    moved_key_refusal,
    moved_override_refusal,
)
from moefold.errors import ConfigError, raise_all

Tree = dict[str, Any]
AUTO = "auto"
"""`parallel = "auto"` at the top level is short for parallel.mapping = "auto"."""
MAX_NAME_CHARACTERS = 200
"""Length of the name in an override; no key is nearly as long, and messages repeat it."""


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> list[str]:
    """Apply overrides `section.key=value` to a tree of sections, in order; `parallel=auto` works as in recipes.

    The settings of a part, `section.key.setting=value`, follow all others: its kind may stand before or after them.
    Another kind keeps the settings of the recipe that it has too.

    Returns:
        A message on settings that another kind lacks.

    Raises:
        ConfigError: an override has another form, or names no section or a key of format 1.
    """
    return [message for override in sorted(overrides, key=_sets_part) if (message := _apply_override(tree, override))]


def _sets_part(override: str) -> bool:
    """Return whether an override gives a setting of a part."""
    key, _, setting = override.partition("=")[0].strip().rpartition(".")
    return bool(setting) and key in part_keys()


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of sections, such as `config_to_dict` returns, after filling missing keys from its preset.

    A learning rate that is left out follows from the method of training (`config/method_defaults.py`).

    A part from outside is built from its table; no file is imported (`part_table.name_files`).

    Raises:
        MissingPartError: a part is not here: its file is not named, or its package is not installed.
        ConfigError: a section, key, type, choice or preset is wrong.
    """
    if FORMAT_KEY in tree:
        tree = check_format(tree, "the recipe")
    tree, parts, wrong_parts = _take_parts(tree)
    problems = wrong_parts | _structure_problems(tree)
    filled = _fill_preset(tree, problems, parts.get(SiteMethodPart.key))
    try:
        cfg = _validator().validate_json(json.dumps(filled, default=_encode_unsupported), strict=True)
    except ValidationError as error:
        for where in dict.fromkeys(item["loc"][:2] for item in error.errors(include_url=False)):
            if len(where) == 2:
                section = str(where[0])
                key = str(where[1])
                problems.setdefault(f"{section}.{key}", _type_problem(section, key, filled[section][key]))
        raise_all(problems.values())
        raise
    raise_all(problems.values())
    for name, part in parts.items():
        section, _, key = name.partition(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{key: part})})
    if "lr" in filled.get("train", {}):
        return cfg
    return replace(
        cfg,
        train=replace(
            cfg.train, lr=default_learning_rate(method_settings(cfg.train, cfg.data, cfg.align, cfg.lora, cfg.rl))
        ),
    )


@cache
def _validator() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _take_parts(tree: Mapping[str, Any]) -> tuple[Tree, dict[str, Part], dict[str, str]]:
    """Build the parts from outside.

    Returns:
        The tree without them, the parts by "section.key", and errors by "section.key".

    Raises:
        MissingPartError: see `config_from_dict`.
    """
    parts: dict[str, Part] = {}
    problems: dict[str, str] = {}
    rest = dict(tree)
    for name in part_keys():
        section, _, key = name.partition(".")
        keys = rest.get(section)
        if not isinstance(keys, dict) or key not in keys:
            continue
        try:
            if isinstance(keys[key], Part):
                # Of a program.
                parts[name] = keys[key]
            elif not is_part_value(name, keys[key]):
                continue
            else:
                parts[name] = build_part(name, keys[key])
        except MissingPartError:
            raise
        except ConfigError as error:
            problems[name] = str(error)
        rest[section] = {other: value for other, value in keys.items() if other != key}
    return rest, parts, problems


def _apply_override(tree: Tree, override: str) -> str:
    """Apply one override; return a message on settings that are left out, or an empty text."""
    name, equals, text = override.partition("=")
    if (name.strip(), text.strip()) == ("parallel", AUTO):
        name = "parallel.mapping"
    section, dot, key = name.strip().partition(".")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError(
            f"override {_format_value(override)} names no key; overrides are section.key=value, such as train.lr=1e-3"
        )
    if not equals:
        raise ConfigError(
            f"{_format_value(override)} is no override; overrides are section.key=value, such as train.lr=1e-3"
        )
    if not dot or not key:
        word = override if len(override) <= MAX_NAME_CHARACTERS else name.strip()
        paths = [path.removesuffix(section) + word for path in paths_with(section)]
        hint = f"; did you mean {' or '.join(paths)}?" if paths else ""
        if not paths and (ours := key_hint(section)):
            hint = f"; {ours}"
        raise ConfigError(
            f"override {_format_value(override)} names no section{hint or '; overrides are section.key=value'}"
        )
    if name.strip() in MOVED:
        raise ConfigError(moved_override_refusal(name.strip(), text.strip()))
    if section not in sections():
        hint = key_hint(name)
        reason = f"unknown key {name.strip()}; {hint}" if hint else explain_unknown_section(section)
        raise ConfigError(f"override {_format_value(override)}: {reason}")
    keys = tree.setdefault(section, {})
    key, dot, setting = key.partition(".")
    if dot and f"{section}.{key}" in part_keys() and isinstance(keys, dict):
        part = keys.get(key, kind_by_default(f"{section}.{key}"))
        keys[key] = {**(part if isinstance(part, dict) else {"kind": part}), setting: _parsed_value(text.strip())}
        return ""
    key += dot + setting
    # A recipe with `run = 3` is refused by the validation that follows.
    if not isinstance(keys, dict):
        return ""
    value = _override_value(section, key, text.strip())
    before = keys.get(key)
    keys[key] = value
    if f"{section}.{key}" not in part_keys() or not isinstance(value, str) or not isinstance(before, dict):
        return ""
    kept, lost = settings_of_other_kind(f"{section}.{key}", before, value)
    if kept:
        keys[key] = {"kind": value, **kept}
    names = ", ".join(f"{section}.{key}.{name}={_format_value(lost[name])}" for name in lost)
    return f"{section}.{key}={value!r} leaves out {names} of the recipe, which it has no key for" if lost else ""


def _override_value(section: str, key: str, text: str) -> Any:
    value = _parsed_value(text)
    takes_text = str in (get_args(key_types(section).get(key)) or (key_types(section).get(key),))
    takes_table = f"{section}.{key}" in part_keys()
    return value if not takes_text or isinstance(value, str | list | (dict if takes_table else str)) else text


def _parsed_value(text: str) -> Any:
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    # Multi-line text could define additional keys: keep it as plain text.
    return parsed["value"] if len(parsed) == 1 else text


def _structure_problems(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, errors of sections and keys, and of values that pydantic would accept."""
    problems: dict[str, str] = {}
    for section, keys in tree.items():
        if section not in sections():
            problems[section] = explain_unknown_section(section)
        elif not isinstance(keys, dict):
            problems[section] = (
                f"{section}={_format_value(keys)} must be a section: write [{section}] and its keys below"
            )
        else:
            for key, value in keys.items():
                if f"{section}.{key}" in MOVED:
                    problems[f"{section}.{key}"] = moved_key_refusal(tree, f"{section}.{key}")
                elif key not in key_types(section):
                    problems[f"{section}.{key}"] = explain_unknown_key(section, key)
                elif reason := value_unsupported_reason(key_types(section)[key], max_magnitude(section, key), value):
                    problems[f"{section}.{key}"] = f"{section}.{key}={_format_value(value)} {reason}"
                elif not _has_exact_type(section, key, value):
                    problems[f"{section}.{key}"] = _type_problem(section, key, value)
    return problems


def _has_exact_type(section: str, key: str, value: Any) -> bool:
    """Return whether a value is finite, not oversized and, for a choice, of its exact type."""
    if is_oversized(value):
        return False
    if choices := choices_of(section, key):
        return any(value == choice and type(value) is type(choice) for choice in choices)
    return not isinstance(value, float) or math.isfinite(value)


def _fill_preset(tree: Mapping[str, Any], problems: dict[str, str], method: Part | None) -> Tree:
    """Return the known sections and keys of the tree, with missing keys filled from model.preset and sites.method.

    Args:
        tree: the tree without parts from outside.
        problems: errors by "section.key", to which others are added.
        method: the part of sites.method, if it is from outside.
    """
    known = {
        section: {key: value for key, value in keys.items() if key in key_types(section)}
        for section, keys in tree.items()
        if section in sections() and isinstance(keys, dict)
    }
    for section, keys in known.items():
        for key in [key for key in keys if f"{section}.{key}" in problems]:
            # It has an error already, and other checks might fail on it.
            del keys[key]
    preset = known.get("model", {}).get("preset", "")
    if isinstance(preset, str) and preset:
        try:
            known["model"] = {**load_preset(preset), **known["model"]}
        except ConfigError as error:
            problems["model.preset"] = str(error)
    if "sites" in known:
        known["sites"] = {**_method_values(known["sites"], method), **known["sites"]}
    return known


def _method_values(keys: Mapping[str, Any], method: Part | None) -> Mapping[str, Any]:
    """Return the values that the method of a section [sites] gives to the keys that it leaves out."""
    kind = keys.get("method")
    if method is None and isinstance(kind, str):
        method = find_part(SiteMethodPart.group, kind)()
    return method.values(keys.get("every", default_of("sites", "every"))) if isinstance(method, SiteMethodPart) else {}


def _type_problem(section: str, key: str, value: Any) -> str:
    name = f"{section}.{key}"
    group = part_keys().get(name)
    if group and isinstance(value, str):
        return unknown_kind(name, group, value, choices_of(section, key))
    expected = f"one of {kinds_in_words(group, choices_of(section, key))}" if group else describe_key(section, key)
    if isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number"
    choices = [choice for choice in choices_of(section, key) if isinstance(choice, str)]
    guess = None
    if isinstance(value, str):
        spelled = [choice for choice in choices if choice.lower() == value.lower()]
        guess = spelled[0] if spelled else our_value(name, value) or closest_match(value, choices)
    return f"{name}={_format_value(value)} must be {expected}" + (f"; did you mean {guess!r}?" if guess else "")


def _format_value(value: Any) -> str:
    """Format a value as in TOML, truncated to 60 characters."""
    if is_oversized(value):
        return f"({value.bit_length()} bits)" if isinstance(value, int) else "(a list or table)"
    text = shown_value(value) if isinstance(value, str | int | float | list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _encode_unsupported(value: object) -> dict[str, str]:
    """Encode TOML dates and times, which no key takes, as an object that fails every type."""
    return {"not a setting": str(value)}
