"""Exceptions whose text is the message to the user, and pip commands for missing extras."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from moefold.terminal import MULTILINE_CHARS, printable

EXIT_FAILED = 1
"""Exit status of a command that ran with a negative result, or of a failed rank."""
EXIT_USER_ERROR = 2
"""Exit status for invalid settings; a message has been printed."""
SIGNAL_STATUS = 128
"""Base of the exit status after a signal: 128 + its number, as in shells; 130 for Ctrl-C."""


class ConfigError(ValueError):
    """Invalid setting, file or combination. The command line prints it as one message and exits 2."""

    faults: tuple[str, ...] = ()
    """Messages, one for each invalid setting."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


MAX_LISTED = 3
"""Number of items that a message lists."""


def format_list(items: Sequence[str]) -> str:
    """Join the first items of a list, with the number of the remaining ones."""
    listed = ", ".join(items[:MAX_LISTED])
    return listed if len(items) <= MAX_LISTED else f"{listed} and {len(items) - MAX_LISTED} more"


class RunError(Exception):
    """Run-time error with an explanation, not caused by a setting: exit status 1."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


class NoFormulaError(Exception):
    """Recipe that the oracle of `moefold verify` has no formula for: neither equal nor unequal. Exit status 3."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


def raise_all(messages: Iterable[object]) -> None:
    """Raise the collected messages and the faults of collected errors, if any, with one line for each.

    Raises:
        ConfigError: there is at least one message or fault.
    """
    lines = [line for message in messages for line in getattr(message, "faults", ()) or (str(message),)]
    if lines:
        listed = f"{len(lines)} settings cannot work:\n  " + "\n  ".join(lines)
        error = ConfigError(lines[0] if len(lines) == 1 else listed)
        error.faults = tuple(lines)
        raise error


DEVICE_OPTION = (
    (r"parallel\.world_size=(\d+) needs a GPU", r"--device cuda needs a GPU"),
    (r"run\.device=", "--device "),
)
"""Replacements for callers whose device is an option."""
TOKENIZER_OPTION = ((r"data\.tokenizer=", "--tokenizer "),)
"""Replacements for callers whose tokenizer is an option."""


@contextmanager
def reworded_errors(*replacements: tuple[str, str]) -> Iterator[None]:
    """Reword errors raised inside: replace recipe keys by the command's options.

    Args:
        replacements: pairs of a regular expression and its replacement.

    Raises:
        ConfigError: the original error, reworded.
        RunError: the original error, reworded.
    """
    try:
        yield
    except (ConfigError, RunError) as error:
        raise type(error)(reword(str(error), *replacements)) from error


def reword(text: str, *replacements: tuple[str, str]) -> str:
    """Replace recipe keys of a message by the command's options, as `reworded_errors` does."""
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text)
    return text


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
