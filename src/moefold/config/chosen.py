"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

from moefold.config.find import built_in_kinds, find_group, find_part, groups
from moefold.config.model import ModelConfig
from moefold.config.part import FlatKey, KindOf, Part
from moefold.config.schema import Config, MoEConfig

AnyPart = TypeVar("AnyPart", bound=Part)


def chosen(recipe: "Config | RoutingSections", group: type[AnyPart]) -> AnyPart:
    """Return the part of a group that a recipe chooses.

    Args:
        recipe: the recipe, or the sections that the group reads.
        group: the base class of the group, from `config/groups/`.
    """
    return _choose(lambda name: read_key(recipe, name), group)


def chosen_in(section: Any, group: type[AnyPart]) -> AnyPart:
    """Return the part of a group whose keys are all in one section.

    Args:
        section: the section of a recipe, such as `cfg.train`.
        group: the base class of the group.
    """
    return _choose(lambda name: getattr(section, name.partition(".")[2]), group)


class RoutingSections(NamedTuple):
    """The sections that the parts of routing read."""

    model: ModelConfig
    moe: MoEConfig


def _choose(read: Callable[[str], Any], group: type[AnyPart]) -> AnyPart:
    value = read(group.key)
    if isinstance(value, str):
        keys = flat_keys(group.group, value)
        values = (_choose(read, key) if isinstance(key, type) else read(key) for _, key in keys)
        value = _build(group.group, value, tuple(values))
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_parts(recipe: Config) -> Iterator[Part]:
    """Yield the part of each group that a recipe chooses."""
    for group in groups():
        part: Part = chosen(recipe, group)
        yield part


def read_key(recipe: "Config | RoutingSections", name: str) -> Any:
    """Return the value of a recipe key, named as "section.key"."""
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key)


@cache
def flat_keys(group: str, kind: str) -> tuple[tuple[str, str | type[Part]], ...]:
    """Return the fields of a built-in part, in order, with what they are read from: a recipe key, or a group of parts.

    Args:
        group: the folder of `parts/`.
        kind: a built-in kind of it.
    """
    part = find_part(group, kind)
    hints = get_type_hints(part, include_extras=True)
    found = ((f.name, entry) for f in fields(part) for entry in getattr(hints[f.name], "__metadata__", ()))
    return tuple(
        (name, entry.name if isinstance(entry, FlatKey) else find_group(entry.group))
        for name, entry in found
        if isinstance(entry, FlatKey | KindOf)
    )


@cache
def readers() -> dict[str, tuple[tuple[type[Part], str], ...]]:
    """Return the group and kind of the built-in parts that read each recipe key, by "section.key".

    Keys that no part reads as a setting of its own are absent.
    """
    found: dict[str, tuple[tuple[type[Part], str], ...]] = {}
    for group in groups():
        for kind in built_in_kinds(group.group):
            for _, key in flat_keys(group.group, kind):
                name = key.key if isinstance(key, type) else key
                found[name] = (*found.get(name, ()), (group, kind))
    return found


@lru_cache(maxsize=1024)
def _build(group: str, kind: str, values: tuple[Any, ...]) -> Any:
    names = (name for name, _ in flat_keys(group, kind))
    return find_part(group, kind)(**dict(zip(names, values, strict=True)))
