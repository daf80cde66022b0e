"""A clean end on Ctrl-C and SIGTERM: the step in flight is finished, then all ranks stop together."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

DUPLICATE_SIGNAL_S = 1.0
"""A terminal sends Ctrl-C to every process, and launchers pass theirs on: what comes so soon after is the same one."""

NOTICE = b"\nmoefold: finishing the step; press Ctrl-C again to abandon it\n"


class StopSignals:
    """Remembers the signals that came while it is entered. A second Ctrl-C abandons the step.

    Args:
        announces: tell the user on stderr that Ctrl-C was heard; for one rank of the job.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces
        self._received_s: dict[int, float] = {}
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def flags(self) -> tuple[bool, ...]:
        """Whether each of SIGNALS came."""
        return tuple(number in self._received_s for number in SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        first_s = self._received_s.setdefault(number, now_s)
        if number != signal.SIGINT:
            return
        if now_s - first_s > DUPLICATE_SIGNAL_S:
            raise KeyboardInterrupt
        if self._announces and first_s == now_s:
            # A handler may stand inside a print: only the plain system call is safe here.
            os.write(2, NOTICE)
