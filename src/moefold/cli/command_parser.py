"""The parser of every command's words: help as wide as the terminal, messages that a terminal can show.

Errors of code that several commands share, in the words of the command at hand.

One message for all ranks of a machine.
"""

import argparse
import re
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NoReturn

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.launch.exit import EXIT_USER_ERROR
from moefold.terminal import MULTILINE_CHARS, printable

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


DEVICE_OPTION = (
    (r"parallel\.world_size=(\d+) needs a GPU", r"--device cuda needs a GPU"),
    (r"run\.device=", "--device "),
)
"""For commands whose device is an option."""
TOKENIZER_OPTION = ((r"data\.tokenizer=", "--tokenizer "),)
"""For commands whose tokenizer is an option."""


@contextmanager
def reworded_errors(*replacements: tuple[str, str]) -> Iterator[None]:
    """Replace what the messages of errors inside say of a recipe by the options of a command.

    Args:
        replacements: regular expressions, and what stands in their place.

    Raises:
        ConfigError: the one that came, reworded.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for pattern, words in replacements:
            text = re.sub(pattern, words, text)
        raise ConfigError(text) from error


RANK0_REPORT_WAIT_S = 10.0
"""A launcher ends all ranks once one has ended, also the first before it has spoken. So the others stay as long."""


@contextmanager
def report_on_local_rank0(rank_env: RankEnv | None) -> Iterator[None]:
    """Around what fails alike on all ranks of a machine: the first of them alone says so, and ends the others by that.

    Where a launcher lets ranks end one by one, they follow after `RANK0_REPORT_WAIT_S`.
    """
    try:
        yield
    except ConfigError:
        if rank_env is None or rank_env.local_rank == 0:
            raise
        time.sleep(RANK0_REPORT_WAIT_S)
        raise SystemExit(EXIT_USER_ERROR) from None
