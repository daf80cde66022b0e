"""List of the runs on a board.

The search is repeated, because jobs start while the board is open.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from moefold.board.run_finder import check_folders, find_runs, name_runs
from moefold.board.run_reader import RunReader

NUM_COLORS = 16
NUM_DASHES = 3
NUM_STYLES = NUM_COLORS * NUM_DASHES
"""A style is dash * NUM_COLORS + colour. Dash 0 is a solid line."""
SEARCH_INTERVAL_S = 10.0
EMPTY_SEARCH_INTERVAL_S = 1.0
"""Shorter search interval while there is no run, because a user may wait for the first run."""
MAX_OPEN = NUM_STYLES // 2
"""Maximum runs that a request reads in full. Only the last lines of the others are read."""
MAX_READ_S = 1.0
"""Time after which a request begins to read no other run: a page with long runs shows the data read so far."""


class RunList:
    """Readers of all runs among and below some folders. There may be no runs yet."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        check_folders(paths)
        self.folders = [path.resolve() for path in paths]
        self._clock = clock
        self._lock = threading.Lock()
        self._readers: dict[str, RunReader] = {}
        self._styles: dict[str, int] = {}
        self._num_reads: dict[str, int] = {}
        self._add_new()

    @property
    def readers(self) -> list[RunReader]:
        """Readers of all runs, in the order of their discovery."""
        return list(self._readers.values())

    def reader(self, key: str) -> RunReader | None:
        """Return the reader of a run, or None if there is no such run."""
        return self._readers.get(key)

    def summary(self, reader: RunReader) -> dict[str, Any]:
        """Return the summary of a run with its style, which does not depend on the selected runs."""
        return reader.summary() | {"style": self._styles[reader.run.key]}

    def summaries(self, wanted_keys: Sequence[str]) -> list[dict[str, Any]]:
        """Read the new data of the wanted runs, and return the summaries of all runs.

        `has_more` is set for a wanted run that has to wait because others used the time of this request.
        """
        with self._lock:
            interval_s = SEARCH_INTERVAL_S if self._readers else EMPTY_SEARCH_INTERVAL_S
            if self._clock() - self._searched_s >= interval_s:
                self._add_new()
        opened = [key for key in dict.fromkeys(wanted_keys) if key in self._readers][:MAX_OPEN]
        start_s = self._clock()
        waiting = set()
        # Runs that were read least often are first, so that each run is read.
        for key in sorted(opened, key=lambda key: self._num_reads[key]):
            if self._clock() - start_s > MAX_READ_S:
                waiting.add(key)
                continue
            self._num_reads[key] += 1
            self._readers[key].read()
        for reader in self.readers:
            if reader.run.key not in opened or reader.run.key in waiting:
                reader.peek()
        summaries = [self.summary(reader) for reader in self.readers]
        return [summary | {"has_more": True} if summary["key"] in waiting else summary for summary in summaries]

    def _add_new(self) -> None:
        for run in find_runs(self.folders):
            if run.key not in self._readers:
                self._styles[run.key] = unused_style(run.key, self._styles.values())
                self._num_reads[run.key] = 0
                self._readers[run.key] = RunReader(run)
        # A run that was found later may have the name of an earlier run.
        for run in name_runs([reader.run.path for reader in self.readers]):
            self._readers[run.key].run = run
        self._searched_s = self._clock()


_STRIDE = 5
"""Distance to the next tried colour. It is coprime to 16."""


def unused_style(key: str, used_styles: Collection[int]) -> int:
    """Return the style of a run: the colour of its key, or the next colour that differs enough from all other runs.

    Solid lines are used first. Beyond `NUM_STYLES` runs, styles repeat.
    """
    wanted_style = int(key, 16)
    colors = [(wanted_style + _STRIDE * i) % NUM_COLORS for i in range(NUM_COLORS)]
    for dash in range(NUM_DASHES):
        ring = [dash * NUM_COLORS + color for color in colors]
        # Neighbouring colours of the palette are similar.
        apart = [style for style in ring if not {_next(style, -1), style, _next(style, 1)} & set(used_styles)]
        free_styles = [style for style in ring if style not in used_styles]
        if free_styles:
            return (apart or free_styles)[0]
    return wanted_style % NUM_STYLES


def _next(style: int, distance: int) -> int:
    dash, color = divmod(style, NUM_COLORS)
    return dash * NUM_COLORS + (color + distance) % NUM_COLORS
