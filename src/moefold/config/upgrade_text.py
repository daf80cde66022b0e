"""Rewrite the text of a recipe of format 1 in format 2: changed keys alone, with all comments. Torch-free."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from moefold.bounded_read import parse_toml
from moefold.config.part_table import toml_value
from moefold.config.upgrade import FORMAT, FORMAT_KEY, KIND, MOVED, check_format, upgraded
from moefold.errors import ConfigError

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


class _Statement(NamedTuple):
    """Lines of a file that belong together: one key with its value, or a single other line."""

    name: str
    """Of a key: "section.key"; of the header of a section: the section; else empty."""
    lines: tuple[str, ...]
    is_header: bool = False

    @property
    def comment(self) -> str:
        """Comment after the value of a key of one line; empty if there is none."""
        line = self.lines[0]
        marks = (match.start() for match in re.finditer("#", line))
        return next((line[mark:] for mark in marks if _is_whole([line[:mark]])), "") if len(self.lines) == 1 else ""

    @property
    def value(self) -> str:
        """Value of a key of one line, as it is spelled."""
        return self.lines[0].removesuffix(self.comment).partition("=")[2].strip()


def upgrade_text(text: str, name: str) -> tuple[str, list[str]]:
    """Return a recipe in format 2, and the keys that were left out because no part of the recipe reads them.

    Args:
        text: a recipe in TOML, of format 1 or 2.
        name: the file, as messages name it.

    Raises:
        ConfigError: the file is not TOML, has a newer format, or writes a key in a form that is not rewritten.
    """
    try:
        tree = check_format(parse_toml(text), name)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    wanted, unread = upgraded(tree)
    old = [key for key in MOVED if key.partition(".")[2] in _keys(tree, key.partition(".")[0])]
    tables = dict.fromkeys(MOVED[key].key for key in old if key not in unread)
    statements = list(_statements(text))
    read = [statement for statement in statements if statement.name not in unread]
    lines = _with_tables(statements, set(old), {key: _entry(wanted, key, read) for key in tables})
    found = "\n".join(_with_format(lines, tree)) + "\n"
    if _parsed(found) != {**wanted, FORMAT_KEY: FORMAT}:
        words = ", ".join(f"{key} ({MOVED[key]})" for key in old)
        raise ConfigError(f"{name} cannot be rewritten, as it has keys in an unusual form; move by hand: {words}")
    return found, unread


def _keys(tree: dict[str, Any], section: str) -> dict[str, Any]:
    keys = tree.get(section)
    return keys if isinstance(keys, dict) else {}


def _entry(tree: dict[str, Any], name: str, statements: list[_Statement]) -> str:
    """Return the line of the key that chooses a part; numbers are spelled as their flat keys had them."""
    section, _, key = name.partition(".")
    spelled = {
        MOVED[found.name].setting: found.value
        for found in statements
        if found.name in MOVED and MOVED[found.name].key == name and len(found.lines) == 1
        if MOVED[found.name].setting != KIND
    }
    table = tree[section][key]
    settings = (f"{setting} = {spelled.get(setting) or toml_value(value)}" for setting, value in table.items())
    return f"{key} = {{ {', '.join(settings)} }}"


def _statements(text: str) -> Iterator[_Statement]:
    section = ""
    lines = iter(text.splitlines())
    for line in lines:
        if header := _HEADER.match(line):
            section = header[1]
            yield _Statement(section, (line,), is_header=True)
        elif key := _KEY.match(line):
            found = [line]
            while not _is_whole(found):
                found.append(next(lines))
            yield _Statement(f"{section}.{key[1]}", tuple(found))
        else:
            yield _Statement("", (line,))


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _is_whole(lines: list[str]) -> bool:
    return _parsed("\n".join(lines)) is not None


def _with_tables(statements: list[_Statement], old: set[str], tables: dict[str, str]) -> list[str]:
    """Return the lines with the tables of parts in the place of what they replace."""
    lines: list[str] = []
    named = {statement.name for statement in statements}
    left = dict(tables)
    # Where the key that chooses the part is left out, its table stands where the first of its flat keys did.
    places = {key: key for key in tables if key in named}
    for name in (statement.name for statement in statements if statement.name in old):
        owner = MOVED[name].key
        if owner in tables and owner.partition(".")[0] == name.partition(".")[0]:
            places.setdefault(owner, name)
    at = {name: owner for owner, name in places.items()}
    for statement in statements:
        entry = left.pop(at[statement.name], None) if statement.name in at else None
        if entry is None and statement.name not in old:
            lines += statement.lines
            continue
        comment = statement.comment
        indent = statement.lines[0][: -len(statement.lines[0].lstrip())] if statement.lines[0][0].isspace() else ""
        if entry is not None:
            lines.append(f"{indent}{entry}{f'  {comment}' if comment else ''}")
        elif comment:
            lines.append(f"{indent}{comment}")
    for owner, entry in left.items():
        section = owner.partition(".")[0]
        headers = [
            number for number, line in enumerate(lines) if (found := _HEADER.match(line)) and found[1] == section
        ]
        if headers:
            lines.insert(headers[0] + 1, entry)
        else:
            lines += ["", f"[{section}]", entry]
    return lines


def _with_format(lines: list[str], tree: dict[str, Any]) -> list[str]:
    """Return the lines with the format above the first key or section, below the comments at the top."""
    line = f"{FORMAT_KEY} = {FORMAT}"
    for number, text in enumerate(lines):
        if (key := _KEY.match(text)) and key[1] == FORMAT_KEY:
            return [*lines[:number], line, *lines[number + 1 :]]
        if key or _HEADER.match(text):
            break
    else:
        return [*lines, line]
    first = number
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    first = first or number
    return [*lines[:first], line, *([""] if _HEADER.match(lines[number]) else []), *lines[first:]]
