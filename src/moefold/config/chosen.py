"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, reduce
from typing import Any, NamedTuple, TypeVar

from moefold.config.find import built_in_kinds, find_part, groups
from moefold.config.groups.attention import OutputGate, QueryKeyNorm
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.part import Part, build_part, flat_keys, flat_keys_of, key_name, make_part
from moefold.config.schema import Config

AnyPart = TypeVar("AnyPart", bound=Part)


def chosen(recipe: "Config | RoutingSections", group: type[AnyPart]) -> AnyPart:
    """Return the part of a group that a recipe chooses.

    Args:
        recipe: the recipe, or the sections that the group reads.
        group: the base class of the group, from `config/groups/`.
    """
    return _choose(lambda name: read_key(recipe, name), group)


def part_of_kind(recipe: Config, group: type[AnyPart], kind: str) -> AnyPart:
    """Return the part that a recipe chooses if it has a kind, else the part of this kind with its defaults."""
    part: AnyPart = chosen(recipe, group)
    found: AnyPart = part if part.kind == kind else make_part(group.group, kind)
    return found


@cache
def default_part(group: type[AnyPart]) -> AnyPart:
    """Return the part of a group in a recipe that sets nothing."""
    return chosen(Config(), group)


def with_part(recipe: Config, part: Part) -> Config:
    """Return a recipe with other settings of a part: in the key that holds it, or in its flat keys."""
    key = getattr(part, "key", "")
    if key and isinstance(read_key(recipe, key), Part):
        return _with_key(recipe, key, part)
    for field, key in flat_keys(part.group, part.kind):
        value = getattr(part, field)
        recipe = with_part(recipe, value) if isinstance(key, type) else _with_key(recipe, key, value)
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
        value = build_part(group.group, value, tuple(values))
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_parts(recipe: Config) -> Iterator[Part]:
    """Yield the part of each group that a recipe chooses."""
    for group in groups():
        part: Part = chosen(recipe, group)
        yield part


def read_key(recipe: "Config | RoutingSections", name: str) -> Any:
    """Return the value of a recipe key, named as "section.key", or of a setting of a part, "section.key.setting"."""
    return reduce(getattr, name.split("."), recipe)


@cache
def readers() -> dict[str, tuple[tuple[type[Part], str], ...]]:
    """Return the group and kind of the built-in parts of a recipe that read each recipe key, by "section.key".

    Keys that no part reads as a setting of its own are absent.
    """
    found: dict[str, tuple[tuple[type[Part], str], ...]] = {}
    for group in groups():
        for kind in built_in_kinds(group.group):
            for _, key in flat_keys(group.group, kind):
                name = key_name(key)
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
        for _, key in flat_keys_of(owner):
            name = key_name(key)
            found[name] = (*found.get(name, ()), owner)
    return found
