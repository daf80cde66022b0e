"""Build a validated, frozen `Config` from the tree of a recipe."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from moefold.config.base.aliases import moefold_value
from moefold.config.base.layer_words import counted_layers
from moefold.config.base.limits import FORMAT_KEY, check_format, is_oversized, value_unsupported_reason
from moefold.config.base.part import KindOf, Part, Table, tables_of
from moefold.config.base.part_registry import find_part, kinds_text
from moefold.config.base.plugins import raise_missing
from moefold.config.groups.site_method import SiteMethodPart
from moefold.config.keys.annotations import max_magnitude
from moefold.config.keys.learning_rates import default_learning_rate, method_settings
from moefold.config.keys.paths import annotation_at, choices_of, default_of, group_at, key_types, sections
from moefold.config.keys.suggestions import (
    describe_key,
    explain_unknown_key,
    explain_unknown_section,
    list_advice,
    wrong_kind,
)
from moefold.config.schema import Config
from moefold.config.tables.build import build_table, is_table_value
from moefold.config.tables.toml_text import brief_problem
from moefold.config.tables.tree import Tree, merged, nested
from moefold.errors import ConfigError, raise_all
from moefold.message_text import Problem, closest_match

Problems = dict[str, str | Problem | ConfigError]


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of sections, such as `config_to_dict` returns, after filling missing keys from its preset.

    An absent learning rate follows from the method of training (`config/keys/learning_rates.py`).

    A part from outside is built from its table without importing a file (see `part_class.import_part_files`).

    Raises:
        MissingPartError: the file of a part is not named, or its package is not installed.
        ConfigError: a section, key, type, choice or preset is wrong.
    """
    if FORMAT_KEY in tree:
        tree = check_format(tree, "the recipe")
    tables = nested(tree)
    refusals = _moved_key_refusals(tables)
    tree, wrong_preset = _with_preset(tables)
    tree, parts, wrong_parts = _take_tables(tree)
    problems: Problems = {**_structure_problems(tree), **wrong_preset, **wrong_parts, **refusals}
    filled = _known_keys(tree, problems, parts.get(SiteMethodPart.key))
    try:
        cfg = _validator().validate_json(json.dumps(filled, default=_encode_unsupported), strict=True)
    except ValidationError as error:
        for path in dict.fromkeys(item["loc"][:2] for item in error.errors(include_url=False)):
            if len(path) == 2:
                section = str(path[0])
                key = str(path[1])
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


def _moved_key_refusals(tree: Tree) -> dict[str, str]:
    """Return the refusal of each key of earlier versions, by "section.key"."""
    keys_by_section = {
        section: keys for section, keys in tree.items() if isinstance(keys, dict) and section in sections()
    }
    unknown = {
        f"{section}.{key}" for section, keys in keys_by_section.items() for key in keys if key not in key_types(section)
    }
    if not unknown:
        return {}
    from moefold.config.upgrade.moved_keys import MOVED
    from moefold.config.upgrade.refusals import moved_key_refusal

    return {name: moved_key_refusal(tree, name) for name in MOVED if name in unknown}


@cache
def _validator() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _with_preset(tree: Tree) -> tuple[Tree, dict[str, str]]:
    """Return a tree whose [model] is completed by its preset, and errors by "section.key"."""
    model: Any = tree.get("model")
    preset = model.get("preset", "") if isinstance(model, dict) else ""
    if not isinstance(preset, str) or not preset:
        return tree, {}
    from moefold.config.presets import load_preset

    try:
        base = load_preset(preset)
        return {**tree, "model": merged("model", base, model | _with_layer_count(base, model))}, {}
    except ConfigError as error:
        return tree, {"model.preset": str(error)}


def _with_layer_count(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return the layers of a [model] that only has their number, with the kinds of another [model]."""
    count = over.get("layers")
    return {"layers": counted_layers(base.get("layers"), count)} if type(count) is int else {}


def _take_tables(tree: Mapping[str, Any]) -> tuple[Tree, dict[str, Any], Problems]:
    """Build the parts and the tables of keys of sections.

    Returns:
        The tree without these keys, the parts and tables by "section.key", and errors by "section.key".

    Raises:
        MissingPartError: see `config_from_dict`.
    """
    parts: dict[str, Any] = {}
    problems: Problems = {}
    remaining = dict(tree)
    for section, owner in sections().items():
        keys = remaining.get(section)
        for key in tables_of(owner):
            if not isinstance(keys, dict) or key not in keys:
                continue
            name = f"{section}.{key}"
            try:
                if not isinstance(keys[key], Part | Table) and not is_table_value(name, keys[key]):
                    continue
                parts[name] = build_table(name, keys[key], default_of(section, key))
            except ConfigError as error:
                problems[name] = error
            remaining[section] = {other: value for other, value in remaining[section].items() if other != key}
    raise_missing(problems.values())
    return remaining, parts, problems


def _structure_problems(tree: Mapping[str, Any]) -> Problems:
    """Return, by name, errors of sections and keys, and of wrong values that pydantic would accept."""
    problems: Problems = {}
    for section, keys in tree.items():
        if section not in sections():
            problems[section] = explain_unknown_section(section)
        elif not isinstance(keys, dict):
            rule = f"must be a section: write [{section}] and its keys below"
            problems[section] = brief_problem(section, keys, rule)
        else:
            for key, value in keys.items():
                if key not in key_types(section):
                    problems[f"{section}.{key}"] = explain_unknown_key(section, key)
                elif reason := value_unsupported_reason(key_types(section)[key], max_magnitude(section, key), value):
                    problems[f"{section}.{key}"] = brief_problem(f"{section}.{key}", value, reason)
                elif not _has_exact_type(section, key, value):
                    problems[f"{section}.{key}"] = _type_problem(section, key, value)
    return problems


def _has_exact_type(section: str, key: str, value: Any) -> bool:
    """Return whether a value is finite, not oversized and, for a choice, of its exact type."""
    if is_oversized(value):
        return False
    annotation = annotation_at(f"{section}.{key}")
    if isinstance(annotation, KindOf):
        return isinstance(value, str) and annotation.takes(value)
    if choices := choices_of(section, key):
        return any(value == choice and type(value) is type(choice) for choice in choices)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        # Without quotes in it, a list on the command line is text.
        return not any(get_origin(arm) is tuple for arm in get_args(key_types(section)[key]))
    return not isinstance(value, float) or math.isfinite(value)


def _known_keys(tree: Mapping[str, Any], problems: Problems, method: SiteMethodPart | None) -> Tree:
    """Return the known sections and keys of the tree without errors, with missing keys of [sites] filled.

    Args:
        method: the part of sites.method, if it is from outside.
    """
    # A key with an error is omitted, because other checks might fail on it.
    filled = {
        section: {
            key: value
            for key, value in keys.items()
            if key in key_types(section) and f"{section}.{key}" not in problems
        }
        for section, keys in tree.items()
        if section in sections() and isinstance(keys, dict)
    }
    if "sites" in filled:
        filled["sites"] = {**_method_values(filled["sites"], method), **filled["sites"]}
    return filled


def _method_values(keys: Mapping[str, Any], method: SiteMethodPart | None) -> Mapping[str, Any]:
    """Return the values of the absent keys of a section [sites] from its method."""
    kind = keys.get("method")
    if method is None and isinstance(kind, str):
        method = find_part(SiteMethodPart.group, kind)()
    return method.values(keys.get("every", default_of("sites", "every"))) if method else {}


def _type_problem(section: str, key: str, value: Any) -> Problem:
    name = f"{section}.{key}"
    group = group_at(name)
    if group and isinstance(value, str):
        return wrong_kind(name, value)
    expected = kinds_text(group, choices_of(section, key)) if group else describe_key(section, key)
    if isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number"
    if "a list of strings" in expected and (advice := list_advice(name, value)):
        return brief_problem(name, value, f"must be {expected}", advice)
    choices = [choice for choice in choices_of(section, key) if isinstance(choice, str)]
    guess = None
    if isinstance(value, str):
        spelled = [choice for choice in choices if choice.lower() == value.lower()]
        guess = spelled[0] if spelled else moefold_value(name, value) or closest_match(value, choices)
    return brief_problem(name, value, f"must be {expected}", f"did you mean {guess!r}?" if guess else "")


def _encode_unsupported(value: object) -> dict[str, str]:
    """Encode TOML dates and times, which no key accepts, as an object that fails every type check."""
    return {"not a setting": str(value)}
