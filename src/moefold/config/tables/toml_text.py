"""Text of values: TOML for recipes, and short forms for messages."""

import json
from collections.abc import Mapping
from typing import Any

from moefold.config.base.limits import is_oversized
from moefold.config.base.part import NONE, SOURCE, Part, Table, default_of_field, settings_of
from moefold.config.base.part_registry import is_built_in
from moefold.message_text import Problem, Setting, UnquotedText


def toml_value(value: Any) -> str:
    """Return a value in TOML: strings, numbers, booleans and lists are written as in JSON."""
    match value:
        case Part() | Table():
            return toml_value(minimal_form(value))
        case None:
            return toml_value(NONE)
        case dict():
            return toml_table(value)
        case tuple():
            return json.dumps(list(value), default=str, ensure_ascii=False)
        case _:
            return json.dumps(value, default=str, ensure_ascii=False)


def minimal_form(value: Any, base: Any = None) -> Any:
    """Return a part or a table in its shortest form in a recipe: without defaults, a part without settings as its kind.

    A part from outside keeps all its keys, because another version may change the defaults.

    Args:
        value: a value of a key.
        base: the value of an omitted key, such as from a preset, or None for the default.
    """
    owner: Any = type(value)
    if isinstance(value, Part) and not is_built_in(owner):
        return _named_by_file(value.as_table())
    if not isinstance(value, Part | Table):
        return NONE if value is None else value
    table = {}
    for key in settings_of(owner):
        before = getattr(base, key, default_of_field(owner, key))
        if (entry := getattr(value, key)) != before:
            table[key] = minimal_form(entry, before)
    if isinstance(value, Table):
        return table
    return {"kind": value.kind, **table} if table else value.kind


def toml_table(table: Mapping[str, Any]) -> str:
    """Return the table of a part in TOML. The kind of a part from a file is its path, if that is recorded."""
    entries = ", ".join(f"{key} = {toml_value(value)}" for key, value in _named_by_file(table).items())
    return f"{{ {entries} }}" if entries else "{}"


def _named_by_file(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a part. Its kind is the path and class of its file, if these are recorded."""
    keys = {key: value for key, value in table.items() if key != SOURCE}
    if file := table.get(SOURCE, {}).get("file"):
        keys["kind"] = f"{file}:{keys['kind'].rpartition(':')[2]}"
    return keys


def shown_value(value: Any) -> str:
    """Return a value as text for messages: TOML with strings in single quotes."""
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(shown_value, value))}]"
        case Part():
            return repr(value.kind)
        case Table():
            return toml_value(value)
        case None:
            return repr(NONE)
        case _:
            return repr(value)


def brief_value(value: Any) -> str:
    """Return a value as text for messages, truncated to 60 characters."""
    if is_oversized(value):
        return f"({value.bit_length()} bits)" if isinstance(value, int) else "(a list or table)"
    text = shown_value(value) if isinstance(value, str | int | float | list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def brief_problem(name: str, value: Any, rule: str, way_out: str = "") -> Problem:
    """Return the problem of an unchecked value, whose message has its `brief_value`."""
    text = brief_value(value)
    is_plain = not is_oversized(value) and str(Setting(name, value)).endswith(f"={text}")
    return Problem(name, value if is_plain else UnquotedText(text), rule, way_out)
