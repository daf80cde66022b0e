"""Bounds, traits and conditions of all recipe keys, read from the annotations of their fields."""

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from moefold.config.base.field import SAME_RUN, Bound, MaxMagnitude, ReadIf, Trait, VerifyAs
from moefold.config.base.limits import MAX_INTEGER, MAX_NUMBER
from moefold.config.base.part import Part, Table, metadata_of, settings_of, tables_of
from moefold.config.keys.paths import key_types, kind_settings, last_name, owner_of, sections
from moefold.config.schema import Config
from moefold.message_text import Problem


def range_problems(cfg: Config) -> Iterator[Problem]:
    """Yield one message for each key whose value is out of its range."""
    for section, key, bound in bounds():
        value = getattr(getattr(cfg, section), key)
        if not bound.is_legal(value):
            yield Problem(f"{section}.{key}", value, f"{bound.rule}")
    for section, owner in sections().items():
        for key in tables_of(owner):
            yield from _table_problems(f"{section}.{key}", getattr(getattr(cfg, section), key))


def _table_problems(path: str, table: Any) -> Iterator[Problem]:
    """Yield one message for each setting of a part or table, and of its own tables, that is out of its range."""
    owner: Any = type(table)
    if not isinstance(table, Part | Table):
        return
    for setting, rule in _bounds_of(owner):
        if not rule.is_legal(value := getattr(table, setting)):
            yield Problem(f"{path}.{setting}", value, f"{rule.rule}")
    for key in tables_of(owner):
        yield from _table_problems(f"{path}.{key}", getattr(table, key))


@cache
def _bounds_of(part: Any) -> tuple[tuple[str, Bound], ...]:
    """Return setting and rule of each setting of a class of parts with a range."""
    return tuple(
        (setting, entry)
        for setting in settings_of(part)
        for entry in metadata_of(part)[setting]
        if isinstance(entry, Bound)
    )


@cache
def bounds() -> tuple[tuple[str, str, Bound], ...]:
    """Return section, key and rule of every key with a range, in schema order."""
    entries = (
        (section, key, entry)
        for section in sections()
        for key, metadata in metadata_of(sections()[section]).items()
        for entry in metadata
    )
    return tuple((section, key, entry) for section, key, entry in entries if isinstance(entry, Bound))


def max_magnitude(section: str, key: str) -> float | None:
    """Return the largest magnitude of a key, or None if its values are not numbers."""
    hint = key_types(section)[key]
    types = get_args(hint) or (hint,)
    if int not in types and float not in types:
        return None
    return _own_maximum(section, key) or (MAX_INTEGER if int in types else MAX_NUMBER)


def max_integer(section: str, key: str) -> int:
    """Return the largest value of a key whose values are integers."""
    return _own_maximum(section, key) or MAX_INTEGER


def _own_maximum(section: str, key: str) -> int | None:
    """Return the largest magnitude that the annotation of a key sets, or None."""
    return next(
        (entry.value for entry in metadata_of(sections()[section])[key] if isinstance(entry, MaxMagnitude)), None
    )


def keys_with(section: str, trait: Trait) -> frozenset[str]:
    """Return the keys of a section whose annotation has a trait, and the settings of its tables by their paths."""
    names = {key for key, metadata in metadata_of(sections()[section]).items() if trait in metadata}
    paths = (path.partition(".") for path in kind_settings() if trait in metadata_of(owner_of(path))[last_name(path)])
    return frozenset(names | {key for owner, _, key in paths if owner == section})


@cache
def keys_of_same_run() -> frozenset[str]:
    """Return the keys that may change when a run is resumed without a line of the log (`SAME_RUN`)."""
    verification = verification_by_key()
    return frozenset(
        name
        for name, annotations in _annotations_by_key().items()
        if SAME_RUN in annotations and verification[name] is not VerifyAs.START
    )


@cache
def verification_by_key() -> dict[str, VerifyAs | None]:
    """Return how `moefold verify` judges each key, by "section.key", with None if the oracle must read it."""
    return {
        name: next((annotation for annotation in reversed(annotations) if isinstance(annotation, VerifyAs)), None)
        for name, annotations in _annotations_by_key().items()
    }


@cache
def read_conditions(tables: tuple[tuple[str, Any], ...]) -> dict[str, tuple[ReadIf, ...]]:
    """Return the conditions under which each key has an effect, by "section.key". Keys without a condition are absent.

    Args:
        tables: path and class of each table and part whose settings count (`chosen.tables_in`).
    """
    of_tables = {
        f"{path}.{key}": annotations for path, owner in tables for key, annotations in metadata_of(owner).items()
    }
    by_key = {
        name: tuple(
            annotation for annotation in annotations if isinstance(annotation, ReadIf) and annotation.conditions != name
        )
        for name, annotations in (_annotations_by_key() | of_tables).items()
    }
    return {name: conditions for name, conditions in by_key.items() if conditions}


@cache
def _annotations_by_key() -> dict[str, tuple[Any, ...]]:
    """Return the metadata of each key by "section.key": the section's, then the key's, which takes precedence."""
    return {
        f"{section}.{key}": (*metadata_of(Config)[section], *metadata)
        for section in sections()
        for key, metadata in metadata_of(sections()[section]).items()
    }
