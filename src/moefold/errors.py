"""Exceptions whose text is the message to the user: configuration errors and understood run-time errors."""

from collections.abc import Iterable, Sequence

from moefold.terminal import MULTILINE_CHARS, printable


class ConfigError(ValueError):
    """Invalid setting, file or combination. The command line prints it as one message and exits 2."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


MAX_LISTED = 3
"""Number of items that a message lists."""


def format_list(items: Sequence[str]) -> str:
    """Join the first items of a list, with the number of the remaining ones."""
    shown = ", ".join(items[:MAX_LISTED])
    return shown if len(items) <= MAX_LISTED else f"{shown} and {len(items) - MAX_LISTED} more"


class RunError(Exception):
    """Run-time error that the message explains and that no setting caused: exit status 1."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return printable(super().__str__(), MULTILINE_CHARS)


def raise_all(messages: Iterable[str]) -> None:
    """Raise the collected errors, if any: one as it is, several one per line.

    Raises:
        ConfigError: there is at least one.
    """
    lines = list(messages)
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} settings cannot work:\n  " + "\n  ".join(lines))
