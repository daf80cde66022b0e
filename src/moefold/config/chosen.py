"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any, TypeVar, get_type_hints

from moefold.config.find import built_in_kinds, find_part, groups
from moefold.config.part import FlatKey, Part
from moefold.config.schema import Config

AnyPart = TypeVar("AnyPart", bound=Part)


def chosen(recipe: Config, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group that a recipe chooses.

    Args:
        recipe: the recipe.
        group: the base class of the group, from `config/groups/`.
    """
    value = read_key(recipe, group.key)
    if isinstance(value, str):
        value = part_of_kind(recipe, group, value)
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def part_of_kind(recipe: Config, group: type[AnyPart], kind: str) -> AnyPart:
    """Return the part of a kind, whether a recipe chooses it or not, with the settings of the recipe."""
    values = tuple(read_key(recipe, name) for _, name in flat_keys(group.group, kind))
    part: AnyPart = _build(group.group, kind, values)
    return part


@cache
def default_part(group: type[AnyPart]) -> AnyPart:
    """Return the part of a group in a recipe that sets nothing."""
    return chosen(Config(), group)


def with_part(recipe: Config, part: Part) -> Config:
    """Return a recipe with other settings of a part that it chooses: in its flat keys, if it has them."""
    if not isinstance(read_key(recipe, part.key), str):
        return _with_key(recipe, part.key, part)
    for field, name in flat_keys(part.group, part.kind):
        recipe = _with_key(recipe, name, getattr(part, field))
    return recipe


def _with_key(recipe: Config, name: str, value: Any) -> Config:
    section, _, key = name.partition(".")
    return replace(recipe, **{section: replace(getattr(recipe, section), **{key: value})})


def chosen_in(section: Any, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group whose keys are all in one section.

    Args:
        section: the section of a recipe, such as `cfg.train`.
        group: the base class of the group.
    """
    value = getattr(section, group.key.partition(".")[2])
    if isinstance(value, str):
        names = (name.partition(".")[2] for _, name in flat_keys(group.group, value))
        value = _build(group.group, value, tuple(getattr(section, name) for name in names))
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_parts(recipe: Config) -> Iterator[Part]:
    """Yield the part of each group that a recipe chooses."""
    for group in groups():
        part: Part = chosen(recipe, group)
        yield part


def read_key(recipe: Config, name: str) -> Any:
    """Return the value of a recipe key, named as "section.key"."""
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key)


@cache
def flat_keys(group: str, kind: str) -> tuple[tuple[str, str], ...]:
    """Return the fields of a built-in part with the recipe keys that they are read from, in order."""
    part = find_part(group, kind)
    hints = get_type_hints(part, include_extras=True)
    return tuple(
        (field.name, entry.name)
        for field in fields(part)
        for entry in getattr(hints[field.name], "__metadata__", ())
        if isinstance(entry, FlatKey)
    )


@cache
def readers() -> dict[str, tuple[tuple[type[Part], str], ...]]:
    """Return the group and kind of the built-in parts that read each recipe key, by "section.key".

    Keys that no part reads as a setting of its own are absent.
    """
    found: dict[str, tuple[tuple[type[Part], str], ...]] = {}
    for group in groups():
        for kind in built_in_kinds(group.group):
            for _, name in flat_keys(group.group, kind):
                found[name] = (*found.get(name, ()), (group, kind))
    return found


@lru_cache(maxsize=1024)
def _build(group: str, kind: str, values: tuple[Any, ...]) -> Any:
    names = (name for name, _ in flat_keys(group, kind))
    return find_part(group, kind)(**dict(zip(names, values, strict=True)))
