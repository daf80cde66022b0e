"""Recipe keys that the fields of built-in parts are read from. Torch-free."""

from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, get_type_hints

from moefold.config.find import find_part
from moefold.config.part import FlatKey


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


@lru_cache(maxsize=1024)
def build_part(group: str, kind: str, values: tuple[Any, ...]) -> Any:
    """Build a part from the values of its recipe keys, in the order of `flat_keys`."""
    names = (name for name, _ in flat_keys(group, kind))
    return find_part(group, kind)(**dict(zip(names, values, strict=True)))
