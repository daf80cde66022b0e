"""Record of the accessed keys of JSON files, and the keys that transformers declares."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


class KeyReader(Mapping[str, Any]):
    """Keys of a JSON object, with a record of accessed keys. Nested objects have their own records.

    It does not support iteration, so that a copy does not count as access to every key; `overlay` copies.

    Attributes:
        values_by_key: the object.
        read_keys: accessed keys, present or not.
        nested: readers of the accessed nested objects.
    """

    def __init__(self, values: Json) -> None:
        self.values_by_key = dict(values)
        self.read_keys: set[str] = set()
        self.nested: dict[str, KeyReader] = {}

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        value = self.values_by_key[key]
        if not isinstance(value, dict):
            return value
        return self.nested.setdefault(key, KeyReader(value))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read_keys.add(key)
        return key in self.values_by_key

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a KeyReader records questions about single keys; copy it with overlay")

    def __len__(self) -> int:
        return len(self.values_by_key)

    def __repr__(self) -> str:
        return repr(self.values_by_key)

    def with_values(self, values: Json) -> "KeyReader":
        """Return a reader with some other values, which records into the same sets."""
        reader = KeyReader({**self.values_by_key, **values})
        reader.read_keys = self.read_keys
        reader.nested = self.nested
        return reader


def overlay(hf_config: Json, values: Json) -> Json:
    """Return an object with some other values; access to it is recorded in the original."""
    return hf_config.with_values(values) if isinstance(hf_config, KeyReader) else {**hf_config, **values}


def mark_read(hf_config: Json, *keys: str) -> None:
    """Record keys as read that other keys make void; objects with all of their keys."""
    for key in keys:
        value = hf_config.get(key)
        if isinstance(value, KeyReader):
            mark_read(value, *value.values_by_key)


def plain(value: Any) -> Any:
    """Return a value of a reader as JSON data."""
    return value.values_by_key if isinstance(value, KeyReader) else value


TABLE = Path(__file__).with_name("declared_keys.json")


@dataclasses.dataclass(frozen=True)
class DeclaredKeys:
    """Keys of the files of other libraries.

    Attributes:
        versions: versions of the libraries of the table.
        generation: keys of generation_config.json.
        adapter: keys of PEFT's LoraConfig.
        others: keys that transformers' classes of causal models of other families declare.
        families: own keys of each `model_type`.
        aliases: other spellings of keys for each `model_type`.
        stacked_by_peft: for each `model_type` whose adapters of single experts PEFT stacks when it loads them, the last
            names of the modules of experts.
    """

    versions: Mapping[str, str]
    generation: Mapping[str, Any]
    adapter: Mapping[str, Any]
    others: frozenset[str]
    families: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, Mapping[str, str]]
    stacked_by_peft: Mapping[str, list[str]]


@lru_cache(maxsize=1)
def declared_keys() -> DeclaredKeys:
    """Read the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return DeclaredKeys(**table | {"others": frozenset(table["others"])})
