"""Describe keys in error messages: their types, the kinds that they take, and the nearest name of a misspelled one."""

import json
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from moefold.config.base.aliases import is_known_path, key_hint
from moefold.config.base.part import KindOf, Part
from moefold.config.base.part_registry import (
    built_in_kinds,
    find_group,
    find_part,
    is_built_in,
    kind_of,
    kinds_text,
    one_of,
    unknown_kind,
)
from moefold.config.keys.paths import (
    annotation_at,
    choices_of,
    key_types,
    part_annotations,
    paths_with,
    sections,
    type_of,
)
from moefold.message_text import Problem, closest_match, join_with_or

DERIVED = {
    "parallel.dp": "parallel.dp follows from world_size/(tp*cp*pp); leave it out and set world_size",
    "parallel.edp": "parallel.edp follows from world_size/(ep*etp*pp); leave it out and set world_size",
}


def wrong_kind(name: str, kind: str) -> Problem:
    """Return the refusal of a kind that a key does not take, with the right key for it or the nearest kind."""
    annotation = annotation_at(name)
    assert isinstance(annotation, KindOf)
    if kind in built_in_kinds(annotation.group):
        return Problem(name, kind, part_class_problem(name, find_part(annotation.group, kind)))
    return unknown_kind(name, annotation.group, kind, annotation.kinds)


@cache
def part_class_problem(name: str, part: Any) -> str:
    """Return the reason why a key does not take a class of parts, and the right key, or "" if the key takes it."""
    reason = _part_class_reason(name, part)
    if not reason:
        return ""
    other_parts = [path for path in part_annotations() if not _part_class_reason(path, part)]
    place = f"it is a kind of {join_with_or(other_parts)}" if other_parts else "no key takes it"
    return f"{reason}; {place}"


def _part_class_reason(name: str, part: Any) -> str:
    annotation = annotation_at(name)
    assert isinstance(annotation, KindOf)
    hint = type_of(*name.split(".", 1))
    if is_built_in(part) and annotation.fact and not annotation.takes(kind_of(part)):
        return f"must be {kinds_text(annotation.group, annotation.kinds)}"
    arms = [arm for arm in get_args(hint) or (hint,) if isinstance(arm, type) and issubclass(arm, Part)]
    missing = [base for base in (find_group(annotation.group), *arms) if not issubclass(part, base)]
    if missing:
        return f"is not a subclass of {missing[0].__module__}.{missing[0].__qualname__}, which this key takes"
    fact, value = annotation.required
    if fact and getattr(part, fact) is not value:
        return f"has {fact}={not value}, and this key takes kinds with {fact}={value}"
    return ""


def describe_key(section: str, key: str) -> str:
    """Describe the type of a key, as `describe_type` does. The kinds of a part are its choices."""
    if isinstance(annotation_at(f"{section}.{key}"), type):
        return "a table"
    choices = choices_of(section, key)
    return "one of " + ", ".join(map(repr, choices)) if choices else describe_type(type_of(section, key))


def describe_type(hint: Any) -> str:
    """Describe a type for an error message: "an integer", "one of 'ring', 'ulysses'"."""
    if get_origin(hint) is Literal:
        return one_of([*map(repr, get_args(hint))])
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {'numbers' if float in get_args(hint) else 'strings'}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def list_advice(name: str, value: Any) -> str:
    """Return how to write a text that is meant as a list of strings, or "" for other values."""
    if not isinstance(value, str) or not value:
        return ""
    items = [word.strip().strip("\"'") for word in value.removeprefix("[").removesuffix("]").split(",")]
    return f"write {name}='{json.dumps(items, ensure_ascii=False)}'"


def explain_unknown_section(name: str) -> str:
    """Return an error message for an unknown section, with the nearest section or key."""
    section, _, key = name.partition(".")
    if section in sections():
        return f"unknown section {json.dumps(name)}: in quotes it is one name; write [{section}], and below it {key}"
    if paths := paths_with(name):
        return f"{name} stands outside any section; did you mean {' or '.join(paths)}?"
    if hint := key_hint(name):
        return f"unknown key {name}; {hint}"
    guess = closest_match(name, sections())
    if guess:
        return f"unknown section [{name}]; did you mean [{guess}]?"
    return f"unknown section [{name}]; the sections are {', '.join(sections())}"


def explain_unknown_key(section: str, key: str) -> str:
    """Return an error message for an unknown key, with the nearest key or all keys of the section."""
    name = f"{section}.{key}"
    if name in DERIVED:
        return DERIVED[name]
    paths = paths_with(key)
    if paths and not is_known_path(name):
        return f"unknown key {name}; did you mean {' or '.join(paths)}?"
    if hint := key_hint(name):
        return f"unknown key {name}; {hint}"
    guess = closest_match(key, key_types(section))
    if guess:
        return f"unknown key {name}; did you mean {section}.{guess}?"
    return f"unknown key {name}; the keys of [{section}] are {', '.join(key_types(section))}"
