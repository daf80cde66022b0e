"""Exceptions whose text is the message to the user, and pip commands for missing extras."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, TypeVar

from moefold.terminal import MULTILINE_CHARS, printable

EXIT_FAILED = 1
"""Exit status of a command that ran with a negative result, or of a failed rank."""
EXIT_USER_ERROR = 2
"""Exit status for invalid settings; a message has been printed."""
SIGNAL_STATUS = 128
"""Base of the exit status after a signal: 128 + its number, as in shells; 130 for Ctrl-C."""

_MAX_REASON_CHARS = 160


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text for a message, cut off if it is long; its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_MAX_REASON_CHARS]


Result = TypeVar("Result")
Names = Mapping[str, "str | Setting"]
_NAMES: ContextVar[Names] = ContextVar("_NAMES", default=MappingProxyType({}))
"""Names that the caller of the running code has for settings; see `spelled_as`."""


@contextmanager
def spelled_as(names: Names) -> Iterator[None]:
    """Name settings as the caller does, in the messages that are made inside.

    Args:
        names: name of each key or option: an option of a command, an argument of a function, or words; empty for a
            setting that the caller cannot set. A `Setting` replaces the value too.
    """
    token = _NAMES.set({**_NAMES.get(), **names})
    try:
        yield
    finally:
        _NAMES.reset(token)


def keep_names(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that names settings as its caller does now, in another process too; it can be pickled."""
    return partial(_call_with_names, dict(_NAMES.get()), function)


def _call_with_names(names: Names, function: Callable[..., Result], *arguments: Any) -> Result:
    with spelled_as(names):
        return function(*arguments)


@dataclass(frozen=True)
class Setting:
    """Mention of a setting in a message; text has quotes without a format, but as in a shell after an option."""

    key: str
    """Recipe key, as "section.key", or an option of a command."""
    value: Any = None
    """Value; None: not shown."""

    def __format__(self, spec: str) -> str:
        """Return `key=value`, or the option or argument that `spelled_as` names for the key, with its value."""
        names = _NAMES.get()
        name: str | Setting = self.key
        while isinstance(name, str) and name in names:
            name = names[name]
        if isinstance(name, Setting) or not name or self.value is None:
            return str(name)
        is_option = name.startswith("--")
        is_apart = is_option or " " in name or (name.isupper() and name != self.key)
        value = quote(self.value) if is_option and isinstance(self.value, str) else _shown(self.value, spec)
        return f"{name}{'' if name.endswith('=') else ' ' if is_apart else '='}{value}"

    def __str__(self) -> str:
        """Return the setting without a format of its value."""
        return format(self, "")

    def problem(self, rule: str, way_out: str = "") -> "Problem":
        """Return the problem that the setting violates a rule."""
        return Problem(self.key, self.value, rule, way_out)


def _shown(value: Any, spec: str) -> str:
    if spec and spec != "s":
        return format(value, spec)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if spec or isinstance(value, Path) else repr(value)


class UnquotedText(str):
    """Text that a message shows without quotes in place of a value, such as a shortened one."""

    def __repr__(self) -> str:
        """Return the text itself."""
        return str(self)


@dataclass(frozen=True)
class Problem:
    """Violation of a rule, as the fields of its message."""

    key: str
    """Recipe key, as "section.key", or an option; empty for a message that is in `rule`."""
    value: Any
    """Value of the key; None: not shown."""
    rule: str
    """Rule on the value, or its incompatibility; follows key and value in the message."""
    way_out: str = ""
    """Way out, which follows a semicolon."""

    def __str__(self) -> str:
        """Return the message: `key=value rule; way out`."""
        joint = "" if self.rule.startswith((":", ",")) else " "
        start = f"{Setting(self.key, self.value)}{joint}" if self.key else ""
        return f"{start}{self.rule}" + (f"; {self.way_out}" if self.way_out else "")


class _EscapedError(Exception):
    """Error whose message is printed."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


class ConfigError(_EscapedError, ValueError):
    """Invalid setting, file or combination. The command line prints it as one message and exits 2."""

    _problems: tuple[Problem, ...] = ()

    def __init__(self, *arguments: object) -> None:
        """Make the message of a text, or of problems in the names of `spelled_as`, one line each."""
        self._problems = tuple(entry for entry in arguments if isinstance(entry, Problem))
        lines = list(map(str, self._problems))
        many = "\n  ".join([f"{len(lines)} settings cannot work:", *lines])
        super().__init__(*([many] if len(lines) > 1 else lines or arguments))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the fields of each line of the message; a message without a key is in `rule`."""
        return self._problems or (Problem("", None, str(self)),)

    def with_start(self, start: str) -> "ConfigError":
        """Return an error on the same problems, whose message has words before it."""
        error = ConfigError(f"{start}{self}")
        error._problems = self._problems
        return error


MAX_LISTED = 3
"""Number of items that a message lists."""


def format_list(items: Sequence[str]) -> str:
    """Join the first items of a list, with the number of the remaining ones."""
    listed = ", ".join(items[:MAX_LISTED])
    return listed if len(items) <= MAX_LISTED else f"{listed} and {len(items) - MAX_LISTED} more"


class RunError(_EscapedError):
    """Run-time error with an explanation, not caused by a setting: exit status 1."""


class NoFormulaError(_EscapedError):
    """Recipe that the oracle of `moefold verify` has no formula for: neither equal nor unequal. Exit status 3."""


def raise_all(messages: Iterable[object]) -> None:
    """Raise the collected messages and the problems of collected errors, if any, with one line for each.

    Args:
        messages: texts, problems and errors.

    Raises:
        ConfigError: there is at least one message.
    """
    problems = [entry for message in messages for entry in _problems_of(message)]
    if problems:
        raise ConfigError(*problems)


def _problems_of(message: object) -> tuple[Problem, ...]:
    if isinstance(message, ConfigError):
        return message.problems
    return (message if isinstance(message, Problem) else Problem("", None, str(message)),)


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra, depending on the installation of moefold.

    A checkout is installed again in editable mode, from its folder; an installed wheel is extended by name.

    Args:
        extra: name in `[project.optional-dependencies]` of pyproject.toml.
    """
    return f"pip install -e '.[{extra}]'" if _is_checkout() else f"pip install 'moefold[{extra}]'"


def _is_checkout() -> bool:
    """Return whether moefold runs from a checkout: in editable mode (PEP 610), or without an installation."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        # Absent for a wheel from a package index.
        origin = distribution("moefold").read_text("direct_url.json")
    except PackageNotFoundError:
        return True
    return origin is not None and json.loads(origin).get("dir_info", {}).get("editable", False) is True
