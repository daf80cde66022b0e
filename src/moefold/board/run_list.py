"""The runs that a board shows: found again from time to time, as jobs start while the board is open. Torch-free."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moefold.board.run_finder import find_runs
from moefold.board.run_reader import RunReader
from moefold.errors import ConfigError

SEARCH_INTERVAL_S = 10.0
MAX_OPEN = 16
"""Runs that one request reads in full; of the others it reads the last line."""


class RunList:
    """Readers of all runs among and below some folders.

    Args:
        paths: run folders, or folders of run folders.
        clock: seconds of a monotonic clock.

    Raises:
        ConfigError: a folder does not exist, or neither is nor contains a run.
    """

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = list(paths)
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: dict[str, RunReader] = {}
        self._add_new()
        self._searched_s = clock()

    @property
    def readers(self) -> list[RunReader]:
        """Readers of all runs, in the order in which they were found."""
        return list(self._readers.values())

    def reader(self, key: str) -> RunReader | None:
        """Return the reader of a run; None if there is no such run."""
        return self._readers.get(key)

    def summaries(self, wanted: Sequence[str]) -> list[dict[str, Any]]:
        """Read what the wanted runs gained, and return the summaries of all runs."""
        with self._lock:
            if self._clock() - self._searched_s >= SEARCH_INTERVAL_S:
                self._add_new()
                self._searched_s = self._clock()
        opened = set(wanted[:MAX_OPEN])
        for reader in self.readers:
            if reader.run.key in opened:
                reader.read()
            else:
                reader.peek()
        return [reader.summary() for reader in self.readers]

    def _add_new(self) -> None:
        for path in self._paths if self._readers else [None]:
            try:
                found = find_runs(self._paths if path is None else [path])
            except ConfigError:
                if path is None:
                    raise
                # The folder was removed while the board is open: its runs keep what was read of them.
                continue
            for run in found:
                if run.key not in self._readers:
                    self._readers[run.key] = RunReader(run)
