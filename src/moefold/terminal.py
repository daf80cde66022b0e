"""Terminal output: escape control sequences of untrusted text (file names, metadata); format bytes. Torch-free."""

import logging
import unicodedata
from typing import TextIO

MULTILINE_CHARS = "\n\t"
"""Control characters kept in multi-line text."""
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and format characters (which may change the text direction), surrogates, and line separators."""
_JOINERS = "\u200c\u200d"
"""Format characters that occur in words and emoji and hide nothing."""


def printable(text: object, allowed: str = "") -> str:
    """Escape every character that a terminal would interpret, or that cannot be encoded, as in Python literals.

    All other characters are unchanged, backslashes included, so that a second call changes nothing.

    Args:
        text: object whose `str` is printed.
        allowed: control characters that are kept.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(char if _is_safe(char) or char in allowed else escape_char(char) for char in plain)


def print_escaped(text: object, *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text of one or several lines with all other control characters escaped."""
    print(printable(text, MULTILINE_CHARS), end=end, file=file, flush=flush)


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
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_bytes(size: int) -> str:
    """Format bytes with three digits in the largest fitting unit: "1.5 GiB"."""
    unit, name = next(entry for entry in UNITS if size >= entry[0] or entry[0] == 1)
    return f"{size / unit:.3g} {name}"
