"""Text from outside made safe for a terminal: names of files, keys and metadata may hold control sequences.

The console of every table and note: rich's own, with control characters of the text escaped.

Bytes for people. Torch-free.
"""

import logging
import unicodedata
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

MULTILINE_CHARS = "\n\t"
"""Kept in text of several lines."""
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, formats (which may turn the direction of text), halves of characters, and separators of lines."""
_JOINERS = "\u200c\u200d"
"""Formats that words and emoji are spelled with, and that hide nothing."""


def printable(text: object, allowed: str = "") -> str:
    """Escape every character that a terminal would obey, or that cannot be encoded, as Python spells it.

    Everything else stays as it is, backslashes included, so that a second call changes nothing.

    Args:
        text: what is to be printed; its `str` is taken.
        allowed: control characters that stay.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(char if _is_safe(char) or char in allowed else _escaped(char) for char in plain)


def print_escaped(text: object, *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text of one or several lines, with every other character that a terminal would obey escaped."""
    print(printable(text, MULTILINE_CHARS), end=end, file=file, flush=flush)


def escape_log_lines() -> None:
    """Escape what Python logs to stderr where no logging is set up: lines that name files among them."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLines())


class _PrintableLines(logging.Formatter):
    """Formats records as always, and escapes the result."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), MULTILINE_CHARS)


def _is_safe(char: str) -> bool:
    return char in _JOINERS or unicodedata.category(char) not in _UNSAFE_CATEGORIES


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PrintableConsole(Console):
    """Prints strings, those in cells of tables among them, so that a terminal obeys none of their characters.

    A `Text` is printed as it is: who makes one escapes what comes from files, recipes or the command line.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text that a string stands for, escaped before its width is measured."""
        return super().render_str(printable(text, MULTILINE_CHARS), **options)


UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_bytes(size: int) -> str:
    """Three digits in the largest unit of which there is one: "1.5 GiB"."""
    unit, name = next(entry for entry in UNITS if size >= entry[0] or entry[0] == 1)
    return f"{size / unit:.3g} {name}"
