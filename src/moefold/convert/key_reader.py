"""Mapping over a JSON object that records the keys that are asked for. Torch-free."""

from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]


class KeyReader(Mapping[str, Any]):
    """Keys of a JSON object, with a record of those that were asked for. Objects inside of it record theirs.

    It cannot be iterated over, so that a copy does not count as a question about every key; `overlay` copies.

    Attributes:
        values_by_key: the object.
        asked: keys that were asked for, present or not.
        nested: readers of the objects inside that were asked for.
    """

    def __init__(self, values: Json) -> None:
        self.values_by_key = dict(values)
        self.asked: set[str] = set()
        self.nested: dict[str, KeyReader] = {}

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        value = self.values_by_key[key]
        if not isinstance(value, dict):
            return value
        return self.nested.setdefault(key, KeyReader(value))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.asked.add(key)
        return key in self.values_by_key

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a KeyReader records questions about single keys; copy it with overlay")

    def __len__(self) -> int:
        return len(self.values_by_key)

    def __repr__(self) -> str:
        return repr(self.values_by_key)

    def with_values(self, values: Json) -> "KeyReader":
        """Return a reader with some other values, which records into the same sets."""
        other = KeyReader({**self.values_by_key, **values})
        other.asked = self.asked
        other.nested = self.nested
        return other


def overlay(hf_config: Json, values: Json) -> Json:
    """Return an object with some other values; asking it is asking the original."""
    return hf_config.with_values(values) if isinstance(hf_config, KeyReader) else {**hf_config, **values}


def mark_read(hf_config: Json, *keys: str) -> None:
    """Record keys as understood that others make void, objects with all of their keys."""
    for key in keys:
        value = hf_config.get(key)
        if isinstance(value, KeyReader):
            mark_read(value, *value.values_by_key)


def plain(value: Any) -> Any:
    """Return a value of a reader as JSON has it."""
    return value.values_by_key if isinstance(value, KeyReader) else value
