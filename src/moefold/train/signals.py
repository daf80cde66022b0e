"""Graceful shutdown on a stop signal or a closed output pipe: finish the step, then stop all ranks together."""

import os
import signal
import time
from types import FrameType
from typing import Any, Self

from moefold.host.processes import STOP_SIGNALS, handle_stop_signals

SIGNALS = (*STOP_SIGNALS, signal.SIGPIPE)
"""Reasons to stop. SIGPIPE stands for a closed output pipe: it is requested, and no signal handler is installed."""

DUPLICATE_SIGNAL_S = 1.0
"""Time within which a repeated signal is a duplicate: a terminal signals every process, and launchers forward it."""

NOTICE = b"\nmoefold: finishing the step; press Ctrl-C again to abandon it\n"


class StopSignals:
    """Context manager that records the stop signals. It can be nested. A second Ctrl-C abandons the step.

    Args:
        announces: confirm the first Ctrl-C on stderr. One rank of the job does.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self.announces = announces
        self._received_s: dict[int, float] = {}
        self._previous_handlers: list[dict[signal.Signals, Any]] = []

    def __enter__(self) -> Self:
        self._previous_handlers.append(handle_stop_signals(self._on_signal))
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.pop().items():
            signal.signal(number, handler)

    @property
    def flags(self) -> tuple[bool, ...]:
        """For each of SIGNALS, True if it was received."""
        return tuple(number in self._received_s for number in SIGNALS)

    def request(self, number: signal.Signals) -> None:
        """Stop as if a signal of SIGNALS had been received."""
        self._received_s.setdefault(number, time.monotonic())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        first_s = self._received_s.setdefault(number, now_s)
        if number != signal.SIGINT:
            return
        if now_s - first_s > DUPLICATE_SIGNAL_S:
            raise KeyboardInterrupt
        if self.announces and first_s == now_s:
            # The signal may have interrupted a print, so only the plain system call is safe here.
            os.write(2, NOTICE)
