"""One error for all faults that were found together."""

from collections.abc import Iterable

from moefold.errors import ConfigError


def raise_all(messages: Iterable[str]) -> None:
    """Raise the faults, if there are any: one as it is, several one a line.

    Raises:
        ConfigError: there is at least one.
    """
    lines = list(messages)
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError(f"{len(lines)} settings cannot work:\n  " + "\n  ".join(lines))
