"""The sections and keys of a recipe, read off the schema, and the words that errors use for them."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moefold.config.schema import Config

DERIVED = {
    "parallel.dp": "parallel.dp follows from world_size/(tp*cp*pp); leave it out and set world_size",
    "parallel.edp": "parallel.edp follows from world_size/(ep*etp*pp); leave it out and set world_size",
}


@cache
def sections() -> dict[str, type]:
    """The dataclass of each section, in the order of the schema."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


@cache
def key_types(section: str) -> dict[str, Any]:
    """The type of each key of one section, in the order of the schema."""
    hints = get_type_hints(sections()[section])
    return {f.name: hints[f.name] for f in fields(sections()[section])}


@cache
def default_of(section: str, key: str) -> Any:
    """What a key is when nobody sets it."""
    return next(f.default for f in fields(sections()[section]) if f.name == key)


def describe_type(hint: Any) -> str:
    """What a value of this type looks like, in words: "an integer", "one of 'ring', 'ulysses'"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {'numbers' if float in get_args(hint) else 'strings'}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `name`, or None when none is near."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None


def sections_with(key: str) -> list[str]:
    """The sections that have a key of this name."""
    return [section for section in sections() if key in key_types(section)]


def explain_unknown_section(name: str) -> str:
    """One sentence on a top-level name that is no section, with the nearest thing that is one."""
    homes = sections_with(name)
    if homes:
        return f"{name} stands outside any section; did you mean {' or '.join(f'{home}.{name}' for home in homes)}?"
    guess = closest_match(name, sections())
    if guess:
        return f"unknown section [{name}]; did you mean [{guess}]?"
    return f"unknown section [{name}]; the sections are {', '.join(sections())}"


def explain_unknown_key(section: str, key: str) -> str:
    """One sentence on a key that its section lacks, with the nearest key or all keys of the section."""
    name = f"{section}.{key}"
    if name in DERIVED:
        return DERIVED[name]
    homes = sections_with(key)
    if homes:
        return f"unknown key {name}; did you mean {' or '.join(f'{home}.{key}' for home in homes)}?"
    guess = closest_match(key, key_types(section))
    if guess:
        return f"unknown key {name}; did you mean {section}.{guess}?"
    return f"unknown key {name}; the keys of [{section}] are {', '.join(key_types(section))}"
