"""Suggestions in error messages: nearest legal values, misspelled keys, hub downloads, and descriptions of types.

Sections, keys and types are read from the schema. Torch-free.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moefold.config.aliases import is_known_path, key_hint
from moefold.config.find import built_in_kinds, find_part
from moefold.config.part import KindOf, marks_of, settings_of
from moefold.config.schema import Config


def nearest_numbers(value: int, legal: Iterable[int], count: int = 6) -> str:
    """Return up to `count` of the legal values closest to `value`, ascending: "1, 2 or 4"."""
    closest = sorted(sorted(set(legal), key=lambda number: (abs(number - value), number))[:count])
    return join_with_or([str(number) for number in closest])


def nearest_multiples(value: int, step: int) -> str:
    """Return the positive multiples of `step` below and above `value`, which is no multiple itself: "252 or 256"."""
    below = value // step * step
    return join_with_or([str(number) for number in (below, below + step) if number > 0])


def join_with_or(options: list[str]) -> str:
    """Join options as a choice: "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


HubKind = Literal["model", "dataset"]
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILE_ENDINGS = frozenset(
    {".arrow", ".bin", ".csv", ".gz", ".jinja", ".json", ".jsonl", ".md", ".ndjson", ".npy", ".parquet", ".py"}
    | {".safetensors", ".toml", ".tsv", ".txt", ".zst"}
)
_LOCAL_FOLDER_NAMES = frozenset({"checkpoints", "data", "recipes", "runs", "src", "tests", "tokens"})
"""Common first folders of local paths: a misspelled path in one of these is not taken for a hub name."""


def is_hub_name(name: str, *, allows_bare_name: bool = False) -> bool:
    """Return whether a name that is no local path has the form of a hub name: "owner/name", or "gpt2" with `bare`."""
    parts = name.split("/")
    if len(parts) not in ((1, 2) if allows_bare_name else (2,)) or not all(map(_PART.fullmatch, parts)):
        return False
    if Path(name).suffix.lower() in _FILE_ENDINGS or (len(parts) == 2 and parts[0] in _LOCAL_FOLDER_NAMES):
        return False
    # If the first folder exists, the name is a misspelled local path.
    return len(parts) == 1 or not Path(parts[0]).exists()


def download_advice(name: str, kind: HubKind = "model", *, allows_bare_name: bool = False) -> str:
    """Return how a repository on the Hugging Face hub is named; "" if the name cannot be one.

    Args:
        name: the user's text, which is no local path.
        kind: kind of repository on the hub.
        bare: whether a name without an owner is allowed: some old tokenizers have such names.
    """
    if not is_hub_name(name, allows_bare_name=allows_bare_name):
        return ""
    prefix = "hf://datasets/" if kind == "dataset" else "hf://"
    return f"it reads like a name on the Hugging Face hub: '{prefix}{name}' downloads it"


DERIVED = {
    "parallel.dp": "parallel.dp follows from world_size/(tp*cp*pp); leave it out and set world_size",
    "parallel.edp": "parallel.edp follows from world_size/(ep*etp*pp); leave it out and set world_size",
}


@cache
def sections() -> dict[str, type]:
    """Return the dataclass of each section, in schema order."""
    hints = get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


@cache
def key_types(section: str) -> dict[str, Any]:
    """Return the type of each key of one section, in schema order."""
    hints = get_type_hints(sections()[section])
    return {f.name: hints[f.name] for f in fields(sections()[section])}


@cache
def part_marks() -> dict[str, KindOf]:
    """Return the mark of each key that chooses a part, by "section.key"."""
    return {
        f"{section}.{key}": entry
        for section in sections()
        for key, marks in marks_of(sections()[section]).items()
        for entry in marks
        if isinstance(entry, KindOf)
    }


@cache
def part_keys() -> dict[str, str]:
    """Return the group of each key that chooses a part, by "section.key"."""
    return {name: mark.group for name, mark in part_marks().items()}


@cache
def kind_settings() -> dict[str, tuple[str, ...]]:
    """Return the built-in kinds that have each setting of a part, by "section.key.setting", in schema order."""
    found: dict[str, tuple[str, ...]] = {}
    for name, mark in part_marks().items():
        for kind in () if mark.is_flat else mark.words or built_in_kinds(mark.group):
            for setting in settings_of(find_part(mark.group, kind)):
                path = f"{name}.{setting}"
                found[path] = (*found.get(path, ()), kind)
    return found


@cache
def choices_of(section: str, key: str) -> tuple[Any, ...]:
    """Return the values that a key chooses from, of parts the built-in kinds; empty: it takes any value of its type."""
    if mark := part_marks().get(f"{section}.{key}"):
        return mark.words or built_in_kinds(mark.group)
    plain = key_types(section)[key]
    return get_args(plain) if get_origin(plain) is Literal else ()


def describe_key(section: str, key: str) -> str:
    """Describe the type of a key, as `describe_type` does; the kinds of a part are its choices."""
    choices = choices_of(section, key)
    return "one of " + ", ".join(map(repr, choices)) if choices else describe_type(key_types(section)[key])


@cache
def default_of(section: str, key: str) -> Any:
    """Return the default of a key; a part with settings of its own where it chooses one."""
    return getattr(_default_section(section), key)


@cache
def _default_section(section: str) -> Any:
    return sections()[section]()


def describe_type(hint: Any) -> str:
    """Describe a type for an error message: "an integer", "one of 'ring', 'ulysses'"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(arm) for arm in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {'numbers' if float in get_args(hint) else 'strings'}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]


def closest_match(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if none is close."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None


def paths_with(key: str) -> list[str]:
    """Return the keys of all sections, and the settings of parts, with this name: "section.key"."""
    of_sections = [f"{section}.{key}" for section in sections() if key in key_types(section)]
    return [*of_sections, *(path for path in kind_settings() if path.endswith(f".{key}"))]


def explain_unknown_section(name: str) -> str:
    """Return an error message for an unknown section, with the nearest section or key."""
    if paths := paths_with(name):
        return f"{name} stands outside any section; did you mean {' or '.join(paths)}?"
    if hint := key_hint(name):
        return f"unknown key {name}; {hint}"
    guess = closest_match(name, sections())
    if guess:
        return f"unknown section [{name}]; did you mean [{guess}]?"
    return f"unknown section [{name}]; the sections are {', '.join(sections())}"


def explain_unknown_key(section: str, key: str) -> str:
    """Return an error message for an unknown key, with the nearest key or all keys of the section."""
    name = f"{section}.{key}"
    if name in DERIVED:
        return DERIVED[name]
    paths = paths_with(key)
    if paths and not is_known_path(name):
        return f"unknown key {name}; did you mean {' or '.join(paths)}?"
    if hint := key_hint(name):
        return f"unknown key {name}; {hint}"
    guess = closest_match(key, key_types(section))
    if guess:
        return f"unknown key {name}; did you mean {section}.{guess}?"
    return f"unknown key {name}; the keys of [{section}] are {', '.join(key_types(section))}"
