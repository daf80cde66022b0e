"""Suggestions in error messages: nearest legal values, misspelled keys, hub downloads, and descriptions of types.

Sections, keys and types are read from the schema.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moefold.config.base.aliases import is_known_path, key_hint
from moefold.config.base.part import KindOf, Part, Table, default_of_field, settings_of, tables_of
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
from moefold.config.schema import Config
from moefold.message_text import Problem


def nearest_numbers(value: int, legal: Iterable[int], count: int = 6) -> str:
    """Return up to `count` of the legal values closest to `value`, ascending: "1, 2 or 4"."""
    closest = sorted(sorted(set(legal), key=lambda number: (abs(number - value), number))[:count])
    return join_with_or([str(number) for number in closest])


def nearest_multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` next to `value`, which is not a multiple itself: "252 or 256"."""
    below = value // step * step
    return join_with_or([str(number) for number in (below, below + step) if number > 0])


def join_with_or(options: list[str]) -> str:
    """Join options as a choice: "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


DERIVED = {
    "parallel.dp": "parallel.dp follows from world_size/(tp*cp*pp); leave it out and set world_size",
    "parallel.edp": "parallel.edp follows from world_size/(ep*etp*pp); leave it out and set world_size",
}


@cache
def sections() -> dict[str, type]:
    """Return the dataclass of each section, in schema order."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


@cache
def key_types(section: str) -> dict[str, Any]:
    """Return the type of each key of one section, in schema order."""
    hints = get_type_hints(sections()[section])
    return {f.name: hints[f.name] for f in fields(sections()[section])}


@cache
def tables() -> dict[str, KindOf | type[Table]]:
    """Return the class of each table, by the path of its key such as "model.ffn.moe.router": a part, or settings.

    A key precedes the keys of its table. A path that several kinds have is returned once.
    """
    annotations: dict[str, KindOf | type[Table]] = {}

    def add(path: str, owner: Any) -> None:
        for name, annotation in tables_of(owner).items():
            if f"{path}.{name}" not in annotations:
                annotations[f"{path}.{name}"] = annotation
                for inner in owners_of(annotation):
                    add(f"{path}.{name}", inner)

    for section, owner in sections().items():
        add(section, owner)
    return annotations


def owners_of(annotation: KindOf | type[Table]) -> Iterator[Any]:
    """Yield the classes whose fields are the keys of a table; for a part, the classes of its built-in kinds."""
    yield from annotation.classes() if isinstance(annotation, KindOf) else (annotation,)


def annotation_at(path: str) -> KindOf | type[Table] | None:
    """Return the class of the table at a path like `tables`, or None."""
    section, *names = path.split(".")
    entry: Any = sections().get(section) if names else None
    for name in names:
        entry = entry and _annotation_in(entry, name)
    annotation: KindOf | type[Table] | None = entry
    return annotation


@cache
def _annotation_in(owner: Any, name: str) -> KindOf | type[Table] | None:
    """Return the annotation of a key of a section, a table or a part, or None.

    Kinds of a part are imported only for a key that the base class of their group lacks.
    """
    owners: Iterable[Any] = [owner]
    if isinstance(owner, KindOf):
        base = find_group(owner.group)
        owners = [base] if name in settings_of(base) else owners_of(owner)
    return next((tables_of(table)[name] for table in owners if name in tables_of(table)), None)


def group_at(path: str) -> str | None:
    """Return the group of the part that the key at a path chooses, or None."""
    annotation = annotation_at(path)
    return annotation.group if isinstance(annotation, KindOf) else None


@cache
def part_annotations() -> dict[str, KindOf]:
    """Return the annotation of each key that chooses a part, by its path."""
    return {path: annotation for path, annotation in tables().items() if isinstance(annotation, KindOf)}


def wrong_kind(name: str, kind: str) -> Problem:
    """Return the refusal of a kind that a key does not take, with the right key for it or the nearest kind."""
    annotation = annotation_at(name)
    assert isinstance(annotation, KindOf)
    if kind in built_in_kinds(annotation.group):
        return Problem(name, kind, part_class_problem(name, find_part(annotation.group, kind)))
    return unknown_kind(name, annotation.group, kind, annotation.kinds)


@cache
def part_class_problem(name: str, part: Any) -> str:
    """Return the reason why a key does not take a class of parts, and the right key; empty: the key takes it."""
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


@cache
def part_keys() -> dict[str, str]:
    """Return the group of each key that chooses a part, by its path."""
    return {name: annotation.group for name, annotation in part_annotations().items()}


@cache
def kind_settings() -> dict[str, tuple[str, ...]]:
    """Return the kinds with each setting of a table, by its path, in schema order; empty for tables without kinds."""
    settings: dict[str, tuple[str, ...]] = {}
    for name, annotation in tables().items():
        for owner in owners_of(annotation):
            for setting in settings_of(owner):
                kind = (kind_of(owner),) if isinstance(annotation, KindOf) else ()
                settings[f"{name}.{setting}"] = (*settings.get(f"{name}.{setting}", ()), *kind)
    return settings


@cache
def owner_of(path: str) -> Any:
    """Return the first class with a setting, given its path: "model.ffn.moe.top_k"."""
    table, _, setting = path.rpartition(".")
    annotation = annotation_at(table)
    assert annotation is not None
    return next(owner for owner in owners_of(annotation) if setting in settings_of(owner))


@cache
def choices_of(section: str, key: str) -> tuple[Any, ...]:
    """Return the legal choices of a key; for parts, the built-in kinds. Empty: the key takes any value of its type."""
    if isinstance(annotation := annotation_at(f"{section}.{key}"), KindOf):
        return annotation.kinds or built_in_kinds(annotation.group)
    plain = type_of(section, key)
    return get_args(plain) if get_origin(plain) is Literal else ()


def type_of(section: str, key: str) -> Any:
    """Return the type of a key of a section, or of a setting of its tables: "ffn.moe.top_k"."""
    return get_type_hints(owner_of(f"{section}.{key}"))[last_name(key)] if "." in key else key_types(section)[key]


def last_name(path: str) -> str:
    """Return the name after the last dot of a path."""
    return path.rpartition(".")[2]


def describe_key(section: str, key: str) -> str:
    """Describe the type of a key, as `describe_type` does. The kinds of a part are its choices."""
    if isinstance(annotation_at(f"{section}.{key}"), type):
        return "a table"
    choices = choices_of(section, key)
    return "one of " + ", ".join(map(repr, choices)) if choices else describe_type(type_of(section, key))


@cache
def default_of(section: str, key: str) -> Any:
    """Return the default of a key, or of a setting of a table: "ffn.moe.top_k"; a part if the key chooses a part."""
    if "." in key:
        return default_of_field(owner_of(f"{section}.{key}"), last_name(key))
    return getattr(_default_section(section), key)


@cache
def _default_section(section: str) -> Any:
    return sections()[section]()


def describe_type(hint: Any) -> str:
    """Describe a type for an error message: "an integer", "one of 'ring', 'ulysses'"."""
    if get_origin(hint) is Literal:
        return one_of([*map(repr, get_args(hint))])
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {'numbers' if float in get_args(hint) else 'strings'}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if none is close."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def paths_with(key: str) -> list[str]:
    """Return the paths "section.key" of all keys and settings of parts with a given name."""
    section_keys = [f"{section}.{key}" for section in sections() if key in key_types(section)]
    return [*section_keys, *(path for path in kind_settings() if path.endswith(f".{key}"))]


def list_advice(name: str, value: Any) -> str:
    """Return how to write a text that is meant as a list of strings; "" for other values."""
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
