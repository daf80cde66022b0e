"""The parts that a recipe chooses, built from its keys. Torch-free."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from moefold.config.find import built_in_kinds, find_part, groups
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.part import Part, build_part, flat_keys, settings_of
from moefold.config.schema import Config

AnyPart = TypeVar("AnyPart", bound=Part)


def chosen(recipe: "Config | Sections", group: type[AnyPart]) -> AnyPart:
    """Return the part of a group that a recipe chooses.

    Args:
        recipe: the recipe, or the sections that the group reads.
        group: the base class of the group, from `config/groups/`.
    """
    return _choose(lambda name: read_key(recipe, name), group)


def part_of_kind(recipe: "Config | Sections", group: type[AnyPart], kind: str) -> AnyPart:
    """Return the part of a kind, whether a recipe chooses it or not, with the settings of the recipe.

    Args:
        recipe: the recipe, or the sections that the group reads.
        group: the base class of the group.
        kind: a kind of it.
    """
    part: Any = read_key(recipe, group.key)
    if not isinstance(part, Part) or kind not in built_in_kinds(group.group):
        return _choose(lambda name: kind if name == group.key else read_key(recipe, name), group)
    owner = find_part(group.group, kind)
    before: Any = type(part)
    shared = [name for name in settings_of(owner) if name in settings_of(before)]
    found: AnyPart = owner(**{name: getattr(part, name) for name in shared})
    return found


@cache
def default_part(group: type[AnyPart]) -> AnyPart:
    """Return the part of a group in a recipe that sets nothing."""
    return chosen(Config(), group)


def with_part(recipe: Config, part: Part) -> Config:
    """Return a recipe with other settings of a part: in the key that holds it, or in its flat keys."""
    key = getattr(part, "key", "")
    if key and isinstance(read_key(recipe, key), Part):
        changed: Config = with_key(recipe, key, part)
        return changed
    for field, key in flat_keys(part.group, part.kind):
        recipe = with_key(recipe, key, getattr(part, field))
    return recipe


def with_key(recipe: Any, name: str, value: Any) -> Any:
    """Return a recipe, a section, a table or a part with another value of a key, given its path."""
    key, dot, inner = name.partition(".")
    return replace(recipe, **{key: with_key(getattr(recipe, key), inner, value) if dot else value})


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


class DispatchSections(NamedTuple):
    """The sections that the dispatchers read."""

    parallel: ParallelConfig
    moe: MoEConfig


Sections = RoutingSections | DispatchSections


def _choose(read: Callable[[str], Any], group: type[AnyPart]) -> AnyPart:
    value = read(group.key)
    if isinstance(value, str):
        values = tuple(read(key) for _, key in flat_keys(group.group, value))
        value = build_part(group.group, value, values)
    assert isinstance(value, group), "the loader builds parts of the group of the key"
    return value


def chosen_parts(recipe: Config) -> Iterator[Part]:
    """Yield the part of each group that a recipe chooses; a kind of another part may lack it."""
    for group in groups():
        if read_key(recipe, group.key) is not None:
            part: Part = chosen(recipe, group)
            yield part


def read_key(recipe: "Config | Sections", name: str) -> Any:
    """Return the value of a recipe key, named as "section.key", or of a setting by its path; None: no table has it."""
    value: Any = recipe
    for key in name.split("."):
        value = getattr(value, key, None)
    return value


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
