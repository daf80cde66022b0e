"""Outputs of a run that are not its state: one that fails is reported once and left out. Torch-free."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from moefold.errors import ConfigError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class AuxiliaryOutputs:
    """Metrics, faults, trackers and plots of a run, which may fail while the training and its checkpoints go on.

    A full disk, a folder that is gone or a tracker that raises must not cost the state of a run: the first failure of
    an output is reported in one line, and nothing more is written to it until the next start.

    Args:
        report: shows the line.
    """

    def __init__(self, report: Callable[[str], None] = logger.warning) -> None:
        self._report = report
        self._failed: set[str] = set()
        self.rejects_settings = False
        """Whether a ConfigError is raised: before the first step, when the user can correct it and nothing is lost."""

    def has_failed(self, name: str) -> bool:
        """Return whether an output is left out."""
        return name in self._failed

    def attempt(
        self, name: str, write: Callable[[], Result], errors: tuple[type[Exception], ...] = (Exception,)
    ) -> Result | None:
        """Call a function that writes to an output, unless that has failed before; return its result, or None.

        Args:
            name: the output, for the message: a file of the run folder, or a tracker.
            write: must not communicate with other ranks, unless `errors` excludes the errors of that.
            errors: the failures that are reported; others are raised.
        """
        if name in self._failed:
            return None
        try:
            return write()
        except errors as error:
            if self.rejects_settings and isinstance(error, ConfigError):
                raise
            self._failed.add(name)
            self._report(
                f"warning: {name} cannot be written any more ({_one_line(error)}): the run goes on without it, and "
                "saves its checkpoints as ever; the next start writes it again"
            )
        return None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
