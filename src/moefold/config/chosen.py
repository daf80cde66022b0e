"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from moefold.config.find import built_in_kinds, groups
from moefold.config.flat_keys import build_part, flat_keys
from moefold.config.part import Part
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
        value = build_part(
            group.group, value, tuple(read_key(recipe, name) for _, name in flat_keys(group.group, value))
        )
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_in(section: Any, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group whose keys are all in one section.

    Args:
        section: the section of a recipe, such as `cfg.train`.
        group: the base class of the group.
    """
    value = getattr(section, group.key.partition(".")[2])
    if isinstance(value, str):
        names = (name.partition(".")[2] for _, name in flat_keys(group.group, value))
        value = build_part(group.group, value, tuple(getattr(section, name) for name in names))
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
