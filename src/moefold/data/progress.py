"""Progress of reading files, on stderr."""

import sys
import time
from types import TracebackType

from moefold.terminal import print_escaped

_FIRST_UPDATE_S = 1.0


_LINE_INTERVAL_S = 10.0


class ReadProgress:
    """Progress of reading a number of bytes, on stderr; silent for the first second.

    A progress bar on a terminal, otherwise a line every ten seconds.
    """

    def __init__(self, label: str, total_bytes: int | None, *, is_shown: bool = True) -> None:
        """Set label and size of the work (None if unknown); nothing is printed yet."""
        self._label = label
        self._total_bytes = total_bytes
        self._is_shown = is_shown
        self._done_bytes = 0
        self._next_line_s = time.monotonic() + _FIRST_UPDATE_S
        self._bar: _ProgressBar | None = None

    def __enter__(self) -> "ReadProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, size_bytes: int) -> None:
        """Add to the number of bytes read."""
        self._done_bytes += size_bytes
        if self._bar is not None:
            self._bar.show(self._done_bytes)
        elif self._is_shown and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_INTERVAL_S
            if sys.stderr.isatty():
                self._bar = _ProgressBar(self._label, self._total_bytes)
                self._bar.show(self._done_bytes)
            else:
                total = "" if self._total_bytes is None else f" of {self._total_bytes / 1e6:.1f}"
                print_escaped(f"{self._label}: {self._done_bytes / 1e6:.1f}{total} MB", file=sys.stderr, flush=True)


class _ProgressBar:
    def __init__(self, label: str, total_bytes: int | None) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from moefold.console import PrintableConsole

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=PrintableConsole(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(label, total=total_bytes)
        self._progress.start()

    def show(self, done_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes)

    def close(self) -> None:
        self._progress.stop()
