"""Signal forwarding: the launcher passes Ctrl-C, SIGTERM and SIGHUP to its ranks and waits for them. Torch-free."""

import multiprocessing
import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from moefold.host.processes import handle_stop_signals
from moefold.launch.exit import SIGNAL_STATUS


class SignalForwarder:
    """Context manager that forwards stop signals to the child processes; a second Ctrl-C kills them.

    A terminal sends Ctrl-C to the ranks too, `kill` only to this process: ranks must tolerate a repeated signal.

    Attributes:
        received: received signals, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pid = os.getpid()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = handle_stop_signals(self._forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def explains(self, exitcode: int) -> bool:
        """Return whether the forwarded signals explain a child's exit code (negative: ended by a signal)."""
        expected = {SIGNAL_STATUS + number for number in self.received} | {-number for number in self.received}
        if self.got_second_interrupt:
            expected.add(-signal.SIGKILL)
        return exitcode in expected

    @property
    def got_second_interrupt(self) -> bool:
        """True after a second Ctrl-C."""
        return self.received.count(signal.SIGINT) > 1

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherits this handler until it installs its own.
            os._exit(SIGNAL_STATUS + number)
        self.received.append(number)
        children = multiprocessing.active_children()
        if not children:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(SIGNAL_STATUS + number)
        for child in children:
            if self.got_second_interrupt:
                child.kill()
            elif child.pid is not None:
                os.kill(child.pid, number)
