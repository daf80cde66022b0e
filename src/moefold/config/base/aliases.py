"""Names of other software for recipe keys, values, matrices and options, for hints on unknown keys.

The tables are in `aliases.toml`. Their names are compared in lower case.
"""

from collections.abc import Mapping
from functools import cache

from moefold.package_table import package_table

TABLES = "config/base/aliases.toml"


def _by_their_names(rows: Mapping[str, list[str]]) -> dict[str, str]:
    return {theirs.lower(): ours for ours, names in rows.items() for theirs in names}


@cache
def our_names(table: str) -> Mapping[str, str]:
    """Return a table by the names of other software: recipe keys, advice, matrices or options."""
    return _by_their_names(package_table(TABLES)[table])


@cache
def our_values() -> Mapping[str, Mapping[str, str]]:
    """Return the values of moefold for each recipe key, by the values of other software."""
    return {key: _by_their_names(rows) for key, rows in package_table(TABLES)["values"].items()}


def key_hint(name: str) -> str:
    """Return the recipe key for a name of other software, whatever its section, dashes and case, or "" if unknown."""
    plain = name.strip().lstrip("-").replace("-", "_").lower()
    for spelling in (plain, plain.rpartition(".")[2]):
        if ours := our_names("keys").get(spelling):
            return f"moefold calls this {ours}"
        if ours := our_names("related").get(spelling):
            return f"moefold sets this by {ours}"
        if answer := our_names("answers").get(spelling):
            return answer
    return ""


def is_known_path(name: str) -> bool:
    """Return whether a name of other software is known with its section, such as rl.beta."""
    path = name.lower()
    return "." in path and any(path in table for table in map(our_names, ("keys", "related", "answers")))


def moefold_value(key: str, value: str) -> str:
    """Return the value of a recipe key for a value of other software, or "" if none is known."""
    return our_values().get(key, {}).get(value.lower(), "")
