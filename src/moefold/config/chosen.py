"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from moefold.config.find import built_in_kinds, find_part, groups
from moefold.config.groups.attention import OutputGate, QueryKeyNorm
from moefold.config.part import Part, build_part, flat_keys, flat_keys_of
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
    """Return the group and kind of the built-in parts of a recipe that read each recipe key, by "section.key".

    Keys that no part reads as a setting of its own are absent.
    """
    found: dict[str, tuple[tuple[type[Part], str], ...]] = {}
    for group in groups():
        for kind in built_in_kinds(group.group):
            for _, name in flat_keys(group.group, kind):
                found[name] = (*found.get(name, ()), (group, kind))
    return found


LAYER_GROUPS = ("attention", "ffn", "indexer", "span")
"""Groups of the parts of layers, which `layers_of` chooses by patterns."""


@cache
def layer_readers() -> dict[str, tuple[Any, ...]]:
    """Return the classes of parts of layers that read each recipe key, by "section.key".

    Norms are left out: rules say what their keys do not go with.
    """
    owners = [find_part(group, kind) for group in LAYER_GROUPS for kind in built_in_kinds(group)]
    found: dict[str, tuple[Any, ...]] = {}
    for owner in (*owners, OutputGate, QueryKeyNorm):
        for _, name in flat_keys_of(owner):
            found[name] = (*found.get(name, ()), owner)
    return found
