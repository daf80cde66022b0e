"""Argument parsing shared by all commands: help that fits the terminal, errors in terms of the command's options.

`report_on_local_rank0` prints an error once for all ranks of a machine.
"""

import argparse
import importlib.util
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from moefold.config.base.aliases import key_hint, our_names
from moefold.errors import EXIT_USER_ERROR, ConfigError, install_command
from moefold.host.rank_env import RankEnv, read_rank_env
from moefold.message_text import closest_match
from moefold.terminal import printable

UNBROKEN_SPACE = "\N{NO-BREAK SPACE}"
_QUOTED = re.compile(r"""(?<!\S)'[^']*'(?!\S)|"[^"]*["]""")


class CommandParser(argparse.ArgumentParser):
    """Argument parser that escapes control characters in its error messages.

    Paragraphs of the description and epilog are wrapped. Indented lines keep their line breaks.
    """

    def __init__(
        self, prog: str | None = None, description: str | None = None, epilog: str | None = None, **settings: Any
    ) -> None:
        """Build the parser from its texts and argparse's other settings."""
        settings = {"formatter_class": _ParagraphFormatter} | settings
        super().__init__(prog=prog, description=description, epilog=epilog, **settings)
        self._takes_settings = False

    def recipe(self, text: str) -> None:
        """Add a recipe and the settings that override it."""
        self.add_argument("recipe", metavar="RECIPE.toml", help=text)
        self.settings("settings that override the recipe")

    def settings(
        self, text: str, metavar: str = "section.key=value", name: str = "overrides", nargs: str = "*"
    ) -> None:
        """Add words that set recipe keys, among others if they have another name than `overrides`."""
        self.add_argument(name, nargs=nargs, metavar=metavar, help=text)
        self._takes_settings = True

    def flag(self, name: str, text: str) -> None:
        """Add a switch, off by default."""
        self.add_argument(name, action="store_true", help=text)

    def repeated(self, name: str, metavar: str, text: str, kind: Callable[[str], Any] = str) -> None:
        """Add an option that may be given more than once. Its value is a list."""
        self.add_argument(name, action="append", default=[], type=kind, metavar=metavar, help=text)

    def option(self, name: str, default: Any, metavar: str | None, text: str, **settings: Any) -> None:
        """Add an option with a value of the type of its default. A type as the default means that it has no default."""
        if not isinstance(default, type):
            settings["default"] = default
            default = type(default)
        self.add_argument(name, type=default, metavar=metavar, help=text, **settings)

    def error(self, message: str) -> NoReturn:
        """Print one line, with control characters escaped, and exit with status 2."""
        hint = self._our_words(message) or f"`{self.prog} --help` explains the arguments"
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {printable(message)}; {hint}\n")

    def _our_words(self, message: str) -> str:
        """Return moefold's name for an argument of other software that argparse does not recognise, "" if unknown."""
        if not message.startswith("unrecognized arguments: "):
            return ""
        from moefold.config.keys.paths import key_types, sections

        options = [option for action in self._actions for option in action.option_strings]
        for name in re.findall(r"(?<!\S)--?([A-Za-z][\w.-]*)", message):
            plain = name.replace("-", "_")
            option = our_names("options").get(plain.lower(), "")
            section, _, key = plain.partition(".")
            if option in options:
                return f"moefold calls this {option}"
            if self._takes_settings and section in sections() and key in key_types(section):
                return f"settings have no dashes: {section}.{key}=VALUE"
            if self._takes_settings and key_hint(name):
                return key_hint(name)
            if guess := closest_match(f"--{name}", options, cutoff=0.75):
                return f"did you mean {guess}?"
        return ""


class _ParagraphFormatter(argparse.HelpFormatter):
    """Help formatter that wraps text at the terminal's width, never within a word such as --keep-tail."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped = list[str]()
        for is_verbatim, group in groupby(text.splitlines(), key=lambda line: not line or line.startswith("  ")):
            lines = list(group)
            if is_verbatim:
                for line in lines:
                    wrapped += _wrapped_line(line, width)
            else:
                wrapped += self._split_lines(" ".join(lines), width)
        return "\n".join(wrapped)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def _wrapped_line(line: str, width: int) -> list[str]:
    """Wrap a long indented line: table rows in their last column, commands with backslashes."""
    if len(line) <= width:
        return [line]
    head = re.match(r" +\S.*? {2,}", line)
    is_command = re.search(r"^ *(\S+ .*\| )?(moefold|curl) ", line) is not None
    broken = textwrap.wrap(
        # A quoted argument stays on one line.
        _QUOTED.sub(lambda quoted: quoted[0].replace(" ", UNBROKEN_SPACE), line),
        width - 2 * is_command,
        subsequent_indent=" " * (len(head[0]) if head else 6),
        break_long_words=False,
        break_on_hyphens=False,
    )
    broken = [row.replace(UNBROKEN_SPACE, " ") for row in broken]
    return [row + " \\" for row in broken[:-1]] + broken[-1:] if is_command else broken


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the path of the recipe and the overrides. The first word is an override if it is `section.key=value`."""
    if recipe is None or ("=" in recipe and not Path(recipe).exists()):
        return None, [*([] if recipe is None else [recipe]), *overrides]
    return Path(recipe), list(overrides)


def check_packages(extra: str, *packages: str, otherwise: str = "") -> None:
    """Raise ConfigError if a package that an extra brings along is not installed."""
    if missing := [package for package in packages if importlib.util.find_spec(package.replace("-", "_")) is None]:
        raise ConfigError(f"the package {missing[0]} is not installed; {install_command(extra)}{otherwise}")


def add_part_option(parser: CommandParser) -> None:
    """Add the option of commands that read a run: files of parts from its training, imported while parsing."""
    text = "a part from a file with which the model was trained; the file is imported; may be repeated"
    parser.repeated("--part", "FILE.py:CLASS", text, _part)


def _part(text: str) -> str:
    from moefold.config.base.plugins import import_files

    try:
        import_files(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


RANK0_REPORT_WAIT_S = 10.0
"""Wait of the other ranks for local rank 0's message, as a launcher ends all ranks once one rank has exited."""


@contextmanager
def report_on_local_rank0() -> Iterator[RankEnv | None]:
    """Give the rank of this process, and report a ConfigError of all ranks of a machine once, on local rank 0.

    The other ranks wait `RANK0_REPORT_WAIT_S` and exit, in case the launcher does not end them first.
    """
    rank_env = read_rank_env()
    try:
        yield rank_env
    except ConfigError:
        if rank_env is None or rank_env.local_rank == 0:
            raise
        time.sleep(RANK0_REPORT_WAIT_S)
        raise SystemExit(EXIT_USER_ERROR) from None
