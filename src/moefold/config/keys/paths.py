"""Keys of a recipe by their paths, "section.key" and "section.key.setting", read from the schema.

A key has a type, a default and choices, and a table has the class of its part or of its settings.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moefold.config.base.part import KindOf, Table, default_of_field, settings_of, tables_of
from moefold.config.base.part_registry import (
    built_in_kinds,
    find_group,
    kind_of,
)
from moefold.config.schema import Config


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
    """Yield the classes whose fields are the keys of a table. For a part these are its built-in kinds."""
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


@cache
def part_keys() -> dict[str, str]:
    """Return the group of each key that chooses a part, by its path."""
    return {name: annotation.group for name, annotation in part_annotations().items()}


@cache
def kind_settings() -> dict[str, tuple[str, ...]]:
    """Return the kinds with each setting of a table, by its path, in schema order. Tables without kinds have none."""
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
    """Return the legal choices of a key, for parts the built-in kinds, or nothing if it takes any value of its type."""
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


@cache
def default_of(section: str, key: str) -> Any:
    """Return the default of a key, or of a setting such as "ffn.moe.top_k". It is a part if the key chooses a part."""
    if "." in key:
        return default_of_field(owner_of(f"{section}.{key}"), last_name(key))
    return getattr(_default_section(section), key)


@cache
def _default_section(section: str) -> Any:
    return sections()[section]()


def paths_with(key: str) -> list[str]:
    """Return the paths "section.key" of all keys and settings of parts with a given name."""
    section_keys = [f"{section}.{key}" for section in sections() if key in key_types(section)]
    return [*section_keys, *(path for path in kind_settings() if path.endswith(f".{key}"))]


def value_at(path: str, tree: Any) -> Any:
    """Return the value of a tree at a path, which may be "none", or None if there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by "section.key", parts as their kinds, and settings of tables by "section.key.setting".

    Args:
        values: values of `keys_of` by "section.key".
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.partition(".")[2] and ("kind" in value or annotation_at(name) is not None):
            kind = {name: value["kind"]} if "kind" in value else {}
            flat |= kind | flat_settings({f"{name}.{key}": entry for key, entry in value.items() if key != "kind"})
        else:
            flat[name] = value
    return flat
