"""The legal settings nearest to a wrong one, in words: the way out that an error offers.

Names on the Hugging Face hub where a file or folder is asked for, and how to fetch what they mean. Torch-free.

The sections and keys of a recipe, read off the schema, and the words that errors use for them.
"""

import difflib
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moefold.config.schema import Config


def nearest_numbers(value: int, legal: Iterable[int], count: int = 6) -> str:
    """Up to `count` of the legal values closest to `value`, ascending: "1, 2 or 4"."""
    closest = sorted(sorted(set(legal), key=lambda number: (abs(number - value), number))[:count])
    return join_with_or([str(number) for number in closest])


def nearest_multiples(value: int, step: int, *, up_only: bool = False) -> str:
    """The positive multiples of `step` on both sides of `value`, which is none itself: "252 or 256"."""
    below = value // step * step
    return join_with_or([str(number) for number in (0 if up_only else below, below + step) if number > 0])


def join_with_or(options: list[str]) -> str:
    """Words as a choice: "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


HubKind = Literal["model", "dataset"]
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILE_ENDINGS = frozenset(
    {".arrow", ".bin", ".csv", ".gz", ".jinja", ".json", ".jsonl", ".md", ".ndjson", ".npy", ".parquet", ".py"}
    | {".safetensors", ".toml", ".tsv", ".txt", ".zst"}
)
_LOCAL_FOLDER_NAMES = frozenset({"checkpoints", "data", "recipes", "runs", "src", "tests", "tokens"})
"""First folders of paths that users type in this program: a slip in one of these is no name on the hub."""


def is_hub_name(name: str, *, bare: bool = False) -> bool:
    """Whether a name that is no path here has the form of one on the hub: "owner/name", and "gpt2" with `bare`."""
    parts = name.split("/")
    if len(parts) not in ((1, 2) if bare else (2,)) or not all(map(_PART.fullmatch, parts)):
        return False
    if Path(name).suffix.lower() in _FILE_ENDINGS or (len(parts) == 2 and parts[0] in _LOCAL_FOLDER_NAMES):
        return False
    # Where the first folder is there, the second part is a slip.
    return len(parts) == 1 or not Path(parts[0]).exists()


def download_advice(name: str, kind: HubKind = "model", *, bare: bool = False) -> str:
    """Return the command that fetches what a name means on the hub; empty if it cannot be a name there.

    Args:
        name: what the user typed, which is no path here.
        kind: of the repository on the hub.
        bare: whether a name without an owner may be one: some old tokenizers have such names.
    """
    if not is_hub_name(name, bare=bare):
        return ""
    folder = name.rpartition("/")[2]
    option = " --repo-type dataset" if kind == "dataset" else ""
    return (
        f"it reads like a name on the Hugging Face hub, from which moefold downloads nothing: type `hf download "
        f"{shlex.quote(name)}{option} --local-dir {shlex.quote(folder)}`, then name the folder {folder!r}"
    )


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
