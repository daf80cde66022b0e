"""Base class of the sections of a recipe whose keys choose parts. Torch-free."""

from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from moefold.config.find import built_in_kinds, find_part, kinds
from moefold.config.part import KindOf


class Section:
    """Section in which a word for a part becomes the part of this kind, with its defaults."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace words by parts; `check_config` refuses a word that is left, as no part has this kind."""
        owner: Any = type(self)
        for name, mark in _part_marks(owner):
            value = getattr(self, name)
            if isinstance(value, str) and _is_kind(mark, value):
                object.__setattr__(self, name, make_part(mark.group, value))


@cache
def make_part(group: str, kind: str, **settings: Any) -> Any:
    """Return the part of a kind with some settings, and the defaults of the others.

    Args:
        group: the folder of `parts/`.
        kind: a kind of it.
        settings: values of its fields, unchecked.

    Raises:
        ConfigError: the group has no such kind, or its package is broken.
    """
    return find_part(group, kind)(**settings)


@cache
def _part_marks(section: Any) -> tuple[tuple[str, KindOf], ...]:
    """Return the keys of a section that choose a part with settings of its own, each with its mark."""
    hints = get_type_hints(section, include_extras=True)
    found = (
        (field.name, entry) for field in fields(section) for entry in getattr(hints[field.name], "__metadata__", ())
    )
    return tuple((name, entry) for name, entry in found if isinstance(entry, KindOf) and not entry.is_flat)


def _is_kind(mark: KindOf, word: str) -> bool:
    if word in built_in_kinds(mark.group):
        return not mark.words or word in mark.words
    return word in kinds(mark.group)
