"""The parts that a recipe chooses."""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from moefold.config.base.part import Part, Table, make_part, tables_of
from moefold.config.base.part_registry import groups
from moefold.config.schema import Config

AnyPart = TypeVar("AnyPart", bound=Part)


def chosen(recipe: Config, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group that a recipe chooses."""
    return as_part(attrgetter(group.key)(recipe), group)


def part_of_kind(recipe: Config, group: type[AnyPart], kind: str) -> AnyPart:
    """Return the part that a recipe chooses if it has a kind, else the part of this kind with its defaults."""
    part: AnyPart = chosen(recipe, group)
    return part if part.kind == kind else make_part(group.group, kind)


@cache
def default_part(group: type[AnyPart]) -> AnyPart:
    """Return the default part of a group."""
    return chosen(Config(), group)


def with_part(recipe: Config, part: Any) -> Config:
    """Return a recipe with another part of a group."""
    changed: Config = with_key(recipe, part.key, part)
    return changed


def with_key(owner: Any, name: str, value: Any) -> Any:
    """Return a recipe, a section, a table or a part with another value of a key, given its path."""
    key, dot, inner = name.partition(".")
    return replace(owner, **{key: with_key(getattr(owner, key), inner, value) if dot else value})


def chosen_in(section: Any, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group whose key is in a section."""
    return as_part(getattr(section, group.key.partition(".")[2]), group)


def as_part(value: Any, group: type[AnyPart]) -> AnyPart:
    """Return a part with its type checked against its group."""
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_parts(recipe: Config) -> Iterator[Part]:
    """Yield the part of each group that a recipe chooses. Some kinds do not have every group."""
    parts = (read_key(recipe, group.key) for group in groups())
    return (part for part in parts if part is not None)


def tables_in(recipe: Config) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key of a recipe that has a table, before the keys of that table."""
    for section in fields(recipe):
        yield from _tables_in(section.name, getattr(recipe, section.name))


def _tables_in(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    kind: Any = type(owner)
    for key in tables_of(kind):
        value = getattr(owner, key)
        yield f"{path}.{key}", value
        if isinstance(value, Part | Table):
            yield from _tables_in(f"{path}.{key}", value)


def read_key(recipe: Config, name: str) -> Any:
    """Return the value of a recipe key, named as "section.key", or of a setting by its path, or None if absent."""
    value: Any = recipe
    for key in name.split("."):
        value = getattr(value, key, None)
    return value
