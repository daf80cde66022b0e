"""Terminal output: escape control sequences of untrusted text, colour labels."""

import logging
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import TextIO

MULTILINE_CHARS = "\n\t"
"""Control characters kept in multi-line text."""
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters (which may change the text direction), surrogates, and line separators."""
_JOINERS = "\u200c\u200d"
"""Format characters that occur in words and emoji and do not hide text."""


def printable(text: object, allowed: str = "") -> str:
    """Escape every character that a terminal would interpret, or that cannot be encoded, as in Python literals.

    All other characters, including backslashes, are unchanged, so that a second call changes nothing.

    Args:
        text: object whose `str` is printed.
        allowed: control characters that are kept.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(char if _is_safe(char) or char in allowed else escape_char(char) for char in plain)


LABEL_COLORS = {
    "error": "1;31",
    "warning": "1;33",
    "stopped": "1;33",
    "note": "33",
    "done": "1;32",
    "wrote": "32",
    "next": "1;36",
    "or": "36",
    "curves": "36",
}
"""ANSI colour codes of the first word of a line (`next: ...`, `wrote FILE`)."""
_LABEL = re.compile(rf"^((?:moefold: )?)({'|'.join(LABEL_COLORS)})\b", re.MULTILINE)
_ERROR = re.compile(r"^(?:moefold: )?error: ")


def print_escaped(text: object, *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text of one or several lines with all other control characters escaped.

    On a terminal the labels of lines have colours, and an error is wrapped between words.
    """
    line = printable(text, MULTILINE_CHARS)
    stream = sys.stdout if file is None else file
    if stream.isatty():
        line = color_labels(wrap_error(line, shutil.get_terminal_size().columns), os.environ)
    print(line, end=end, file=stream, flush=flush)


def color_labels(text: str, environment: Mapping[str, str]) -> str:
    """Colour the first word of each line that `LABEL_COLORS` lists, unless NO_COLOR is set or TERM is "dumb".

    NO_COLOR counts if it is set and not empty (https://no-color.org).
    """
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return text
    return _LABEL.sub(lambda match: f"{match[1]}\x1b[{LABEL_COLORS[match[2]]}m{match[2]}\x1b[0m", text)


def wrap_error(text: str, width: int) -> str:
    """Wrap the first line of an error message between words. Other text, such as a command to copy, stays unwrapped."""
    first, newline, tail = text.partition("\n")
    if not _ERROR.match(first) or len(first) <= width:
        return text
    lines = textwrap.wrap(first, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + newline + tail


def escape_log_lines() -> None:
    """Escape the lines that Python's last-resort logging handler prints to stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableLines())


class _PrintableLines(logging.Formatter):
    """Log formatter that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), MULTILINE_CHARS)


def _is_safe(char: str) -> bool:
    return char in _JOINERS or unicodedata.category(char) not in _UNSAFE_CATEGORIES


def escape_char(char: str) -> str:
    """Return the escape of a character in a literal of Python and of YAML."""
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
