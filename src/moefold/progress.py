"""Progress line on stderr for long commands: live on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from moefold.terminal import print_escaped, printable

ProgressCallback = Callable[[str], None]
"""Callback that takes a description of the current work."""


def ignore_progress(text: str) -> None:
    """Ignore progress, in place of `WorkProgress.report`."""


SHOW_AFTER_S = 2.0
"""Minimum duration of work that is shown."""
LINE_EVERY_S = 5.0
"""Minimum interval of plain lines."""
REPEAT_EVERY_S = 60.0
"""Interval of plain lines while the description does not change."""
_POLL_S = 0.2


class WorkProgress:
    """Context manager that shows the progress of long work. `report` sets the description.

    A thread prints it, so that the elapsed time advances during a long stage, and a stage that starts within
    `line_every_s` of another is still printed. Do not fork inside: a child could inherit the lock of stderr.

    Args:
        is_shown: whether this process prints. Only one of many ranks does.
        line_every_s: minimum seconds between two plain lines.
    """

    def __init__(
        self,
        label: str,
        *,
        is_shown: bool = True,
        show_after_s: float = SHOW_AFTER_S,
        line_every_s: float = LINE_EVERY_S,
    ) -> None:
        self._label = label
        self._is_shown = is_shown
        self._show_after_s = show_after_s
        self._line_every_s = line_every_s
        self._text = ""
        self._last_shown = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._is_shown:
            show = self._show_live if sys.stderr.isatty() else self._show_lines
            self._thread = threading.Thread(target=show, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def report(self, text: str) -> None:
        """Set the description of the current work."""
        self._text = printable(text)

    def _show_lines(self) -> None:
        last_s = -float("inf")
        if self._ended.wait(self._show_after_s):
            return
        while True:
            now_s = time.monotonic()
            since_s = now_s - last_s
            text = self._text
            if (text != self._last_shown and since_s >= self._line_every_s) or since_s >= REPEAT_EVERY_S:
                last_s = now_s
                self._last_shown = text
                print_escaped(self._line(text), file=sys.stderr, flush=True)
            if self._ended.wait(_POLL_S):
                return

    def _line(self, text: str) -> str:
        title = f"{self._label}: {text}" if text else self._label
        return f"{title} ({time.monotonic() - self._started_s:.0f} s)"

    def _show_live(self) -> None:
        if self._ended.wait(self._show_after_s):
            return
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from moefold.console import PrintableConsole

        columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
        bar = Progress(
            *columns,
            console=PrintableConsole(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task = bar.add_task(self._label, total=None)
        with bar:
            while not self._ended.wait(_POLL_S):
                description = f"{self._label}: {self._text}" if self._text else self._label
                bar.update(task, description=description)
                bar.refresh()


class ReadProgress(WorkProgress):
    """Context manager that shows the number of read bytes and the total, after a second.

    Args:
        total_bytes: size of the work, or None if it is unknown.
    """

    def __init__(self, label: str, total_bytes: int | None, *, is_shown: bool = True) -> None:
        super().__init__(label, is_shown=is_shown, show_after_s=1.0, line_every_s=10.0)
        self._total = "" if total_bytes is None else f" of {total_bytes / 1e6:.1f}"
        self._done_bytes = 0

    def advance(self, size_bytes: int) -> None:
        """Add to the number of bytes read."""
        self._done_bytes += size_bytes
        self.report(f"{self._done_bytes / 1e6:.1f}{self._total} MB")
