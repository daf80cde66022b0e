"""Record of the fields of recipes, losses and samples that the oracle reads."""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, cast

from moefold.config.base.part import Part

T = TypeVar("T")


class ReadRecord:
    """Names of the dataclass fields that were read through `watch`, as "section.key"."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watch(self, value: T) -> T:
        """Return a stand-in for a dataclass instance that records the reads of its fields.

        Sections, tables, and parts with `framed` fields are also watched. A property reads fields through the stand-in,
        so they are recorded. A method reads the instance itself, without a record.
        """
        return cast(T, _Watched(value, "", self.names))

    def unread(self, value: Any, prefix: str = "") -> Iterator[str]:
        """Yield the names of unread fields of a dataclass instance that differ from their default.

        For a part, only `framed` fields count: a test shows that its formula reads the others.
        """
        for field in fields(value):
            name = prefix + field.name
            entry = getattr(value, field.name)
            is_table = is_dataclass(entry) and not isinstance(entry, Part)
            is_framed = not isinstance(value, Part) or field.name in value.framed
            is_leaf = is_framed and (not is_table or field.default is None)
            if is_leaf and name not in self.names and not _is_default(value, field, entry):
                yield name
            elif is_dataclass(entry) and (is_framed or not is_table):
                yield from self.unread(entry, f"{name}.")


def _is_default(owner: Any, field: Field, value: Any) -> bool:
    if isinstance(value, Part):
        return bool(value == getattr(type(owner)(), field.name))
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(default, bool | int | float | str | tuple):
        return bool(value == default)
    # Columns of samples: absent or empty.
    return value is default or (default == {} and not value)


class _Watched:
    """Stand-in for a dataclass instance. A field is recorded when it is first read, and then an attribute."""

    def __init__(self, value: Any, prefix: str, names: set[str]) -> None:
        self._value = value
        self._prefix = prefix
        self._names = names

    def __getattr__(self, name: str) -> Any:
        declared = inspect.getattr_static(type(self._value), name, None)
        if isinstance(declared, property) and declared.fget is not None:
            value = declared.fget(self)
        else:
            value = getattr(self._value, name)
            if name in {field.name for field in fields(self._value)}:
                self._names.add(self._prefix + name)
                if is_dataclass(value) and (not isinstance(value, Part) or value.framed):
                    value = _Watched(value, f"{self._prefix}{name}.", self._names)
        self.__dict__[name] = value
        return value
