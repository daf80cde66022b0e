"""Upgrade the text of a recipe: only flat keys change, to tables of parts, and all comments stay."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moefold.bounded_read import parse_toml
from moefold.config.base.limits import FORMAT, FORMAT_KEY, check_format
from moefold.config.keys.paths import key_types, kind_settings, sections, value_at
from moefold.config.tables.toml_text import toml_value
from moefold.config.upgrade.moved_keys import KIND, MOVED
from moefold.config.upgrade.recipe import upgraded
from moefold.config.upgrade.refusals import check_one_name, moved_key_refusal
from moefold.errors import ConfigError

MAX_ENTRY = 100
"""Maximum characters of a table on one line of its section. A longer table has a header."""
APART = ("dense", "moe")
"""Tables with their own header if the table around them has a header."""
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


class _Statement(NamedTuple):
    """Lines of a statement of a file: a key with its value, or another single line."""

    name: str
    """Path of a key, "section.key", or the name of the section for a header, or empty."""
    lines: tuple[str, ...]
    is_header: bool = False

    @property
    def comment(self) -> str:
        """Comment after the value of a key of one line, or empty if there is none."""
        line = self.lines[0]
        marks = (match.start() for match in re.finditer("#", line))
        return next((line[start:] for start in marks if _is_whole([line[:start]])), "") if len(self.lines) == 1 else ""

    @property
    def value(self) -> str:
        """Value of a key of one line, as written."""
        return self.lines[0].removesuffix(self.comment).partition("=")[2].strip()


def upgrade_text(text: str, name: str) -> tuple[str, list[str]]:
    """Return a recipe in format 2, and the dropped keys that no part of the recipe reads.

    Args:
        text: a recipe in TOML, of this format or an earlier one.
        name: the file, for messages.

    Raises:
        ConfigError: the file is not TOML, has a newer format, or has a key in an unsupported form.
    """
    try:
        tree = check_format(parse_toml(text), name)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    old = [key for key in MOVED if key.partition(".")[2] in _keys(tree, key.partition(".")[0])]
    check_one_name(tree, old, name)
    upgraded_tree, unread = upgraded(tree)
    if stay := [key for key in old if key.partition(".")[2] in _keys(upgraded_tree, key.partition(".")[0])]:
        raise ConfigError(f"{name}: {moved_key_refusal(tree, stay[0])}")
    owners = [
        f"{section}.{key}"
        for section in sections()
        for key in key_types(section)
        if _keys(upgraded_tree, section).get(key) != _keys(tree, section).get(key)
    ]
    statements = list(_statements(text))
    spelled = {
        str(MOVED[entry.name]): entry.value
        for entry in statements
        if entry.name in MOVED and entry.name not in unread and MOVED[entry.name].setting not in (KIND, "layers")
    }
    found_tables = {owner: value_at(owner, upgraded_tree) for owner in owners}
    entries = {owner: _entry(owner, value, spelled) for owner, value in found_tables.items()}
    blocks = {
        owner: _block(owner, found_tables[owner], spelled) for owner, entry in entries.items() if not _fits(entry)
    }
    short = {owner: entry for owner, entry in entries.items() if owner not in blocks}
    lines = _with_tables(statements, {*old, *blocks}, short)
    lines = _with_blocks(lines, blocks)
    text_out = "\n".join(_with_format(lines, tree)) + "\n"
    if _parsed(text_out) != {**upgraded_tree, FORMAT_KEY: FORMAT}:
        words = ", ".join(f"{key} ({MOVED[key]})" for key in old)
        by_hand = f"move by hand: {words}" if words else "write each section as [section] with its keys below"
        raise ConfigError(f"{name} cannot be rewritten, as it has keys in an unusual form; {by_hand}")
    return text_out, unread


def _keys(tree: dict[str, Any], section: str) -> dict[str, Any]:
    keys = tree.get(section)
    return keys if isinstance(keys, dict) else {}


def _entry(path: str, value: Any, spelled: Mapping[str, str]) -> str:
    """Return the line of a key. Numbers are written as in their flat keys."""
    return f"{path.rpartition('.')[2]} = {_inline(path, value, spelled)}"


def _inline(path: str, value: Any, spelled: Mapping[str, str]) -> str:
    if isinstance(value, dict):
        entries = ", ".join(_entry(f"{path}.{key}", entry, spelled) for key, entry in _in_order(path, value))
        return f"{{ {entries} }}" if entries else "{}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return spelled.get(path, "") if is_number and path in spelled else toml_value(value)


def _in_order(path: str, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys of a table in the order of the schema, its kind first."""
    order = {name: number for number, name in enumerate(kind_settings())}
    return sorted(table.items(), key=lambda item: order.get(f"{path}.{item[0]}", -1))


def _fits(entry: str) -> bool:
    """Return whether the line of a table is short enough for the keys of its section."""
    return len(entry) <= MAX_ENTRY


def _block(path: str, table: Mapping[str, Any], spelled: Mapping[str, str]) -> list[str]:
    """Return the lines of a table under its own headers."""
    entries = {key: _entry(f"{path}.{key}", value, spelled) for key, value in _in_order(path, table)}
    apart = [key for key in entries if isinstance(table[key], dict) and (not _fits(entries[key]) or key in APART)]
    keys = [entry for key, entry in entries.items() if key not in apart]
    lines = ["", f"[{path}]", *keys] if keys else []
    return lines + [line for key in apart for line in _block(f"{path}.{key}", table[key], spelled)]


def _with_blocks(lines: list[str], blocks: Mapping[str, list[str]]) -> list[str]:
    """Return the lines with tables at the end of their sections."""
    for owner, block in blocks.items():
        section = owner.partition(".")[0]
        inside = False
        end = len(lines)
        for number, line in enumerate(lines):
            if header := _HEADER.match(line):
                if inside and header[1].partition(".")[0] != section:
                    end = number
                    break
                inside = inside or header[1] == section
        if not inside:
            lines = [*lines, "", f"[{section}]"]
            end = len(lines)
        while lines[end - 1].startswith("#") or not lines[end - 1].strip():
            end -= 1
        lines = [*lines[:end], *block, *lines[end:]]
    return lines


def _statements(text: str) -> Iterator[_Statement]:
    section = ""
    lines = iter(text.splitlines())
    for line in lines:
        if header := _HEADER.match(line):
            section = header[1]
            yield _Statement(section, (line,), is_header=True)
        elif key := _KEY.match(line):
            statement = [line]
            while not _is_whole(statement):
                statement.append(next(lines))
            yield _Statement(f"{section}.{key[1]}", tuple(statement))
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
    """Return the lines with the tables of parts instead of the flat keys."""
    lines: list[str] = []
    known = {statement.name for statement in statements}
    remaining = dict(tables)
    # If the key that chooses the part is absent, its table replaces the first of its flat keys.
    places = {key: key for key in tables if key in known}
    for name in (statement.name for statement in statements if statement.name in MOVED):
        owner = ".".join(str(MOVED[name]).split(".")[:2])
        if owner in tables and owner.partition(".")[0] == name.partition(".")[0]:
            places.setdefault(owner, name)
    owners = {name: owner for owner, name in places.items()}
    for statement in statements:
        entry = remaining.pop(owners[statement.name], None) if statement.name in owners else None
        if entry is None and statement.name not in old:
            lines += statement.lines
            continue
        comment = statement.comment
        indent = statement.lines[0][: -len(statement.lines[0].lstrip())] if statement.lines[0][0].isspace() else ""
        if entry is not None:
            lines.append(f"{indent}{entry}{f'  {comment}' if comment else ''}")
        elif comment:
            lines.append(f"{indent}{comment}")
    for owner, entry in remaining.items():
        section = owner.partition(".")[0]
        headers = [
            number for number, line in enumerate(lines) if (match := _HEADER.match(line)) and match[1] == section
        ]
        if headers:
            lines.insert(headers[0] + 1, entry)
        else:
            lines += ["", f"[{section}]", entry]
    return lines


def _with_format(lines: list[str], tree: dict[str, Any]) -> list[str]:
    """Return the lines with the format inserted above the first key or section, below the comments at the top."""
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
