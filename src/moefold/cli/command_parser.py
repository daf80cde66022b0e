"""The parser of every command's words: help as wide as the terminal, messages that a terminal can show."""

import argparse
import re
import textwrap
from itertools import groupby
from typing import Any, NoReturn

from moefold.printable import MULTILINE_CHARS, printable

UNBROKEN_SPACE = "\N{NO-BREAK SPACE}"


class CommandParser(argparse.ArgumentParser):
    """Refuses wrong words as argparse does, with the control characters in them escaped.

    Its description and epilog are paragraphs, which are wrapped, and indented lines, which keep their breaks.
    """

    def __init__(self, **settings: Any) -> None:
        """Build the parser with the settings of argparse."""
        super().__init__(**{"formatter_class": _ParagraphFormatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message that repeats the user's words, and leave with status 2."""
        super().error(printable(message, MULTILINE_CHARS))


class _ParagraphFormatter(argparse.HelpFormatter):
    """Wraps text at the width of the terminal, never within a word such as --keep-tail."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        found = list[str]()
        for is_verbatim, group in groupby(text.splitlines(), key=lambda line: not line or line.startswith("  ")):
            lines = list(group)
            if is_verbatim:
                for line in lines:
                    found += _wrapped_line(line, width)
            else:
                found += self._split_lines(" ".join(lines), width)
        return "\n".join(found)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def _wrapped_line(line: str, width: int) -> list[str]:
    """Break an indented line that is too long: a row of a table within its last column, a command with backslashes."""
    if len(line) <= width:
        return [line]
    head = re.match(r" +\S.*? {2,}", line)
    is_command = re.search(r"^ *(\S+ .*\| )?moefold ", line) is not None
    broken = textwrap.wrap(
        # A quoted argument stays whole.
        re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace(" ", UNBROKEN_SPACE), line),
        width - 2 * is_command,
        subsequent_indent=" " * (len(head[0]) if head else 6),
        break_long_words=False,
        break_on_hyphens=False,
    )
    broken = [part.replace(UNBROKEN_SPACE, " ") for part in broken]
    return [part + " \\" for part in broken[:-1]] + broken[-1:] if is_command else broken
