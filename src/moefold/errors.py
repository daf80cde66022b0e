"""What ends a command with one message: what a user can cause, and what goes wrong in a run."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A setting, a file or a combination that cannot work. The command line prints it as one message and exits 2."""


class FaultError(RuntimeError):
    """Something in a run went wrong that nobody asked for. The command line prints it as one message and exits 1.

    All ranks raise it alike, or the others could not be told.
    """


NAMED_FAULTS = 3
"""So many of one kind are named in a message."""


def some(faults: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    shown = ", ".join(faults[:NAMED_FAULTS])
    return shown if len(faults) <= NAMED_FAULTS else f"{shown} and {len(faults) - NAMED_FAULTS} more"
