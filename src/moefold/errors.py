"""Exceptions whose text is the message to the user, and pip commands for missing extras."""

import json
from collections.abc import Iterable

from moefold.message_text import Problem
from moefold.terminal import MULTILINE_CHARS, printable

EXIT_FAILED = 1
"""Exit status of a command that ran with a negative result, or of a failed rank."""
EXIT_USER_ERROR = 2
"""Exit status for invalid settings. A message has been printed."""
SIGNAL_STATUS = 128
"""Base of the exit status after a signal: 128 + its number, as in shells, so 130 for Ctrl-C."""


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
        """Return the fields of each line of the message. A message without a key is in `rule`."""
        return self._problems or (Problem("", None, str(self)),)

    def with_start(self, start: str) -> "ConfigError":
        """Return an error on the same problems, whose message has words before it."""
        error = ConfigError(f"{start}{self}")
        error._problems = self._problems
        return error


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

    A checkout is installed again in editable mode, from its folder. An installed wheel is extended by name.

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
