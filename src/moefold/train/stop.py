"""A clean end on Ctrl-C and SIGTERM: the step in flight is finished, then all ranks stop together."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Remembers the signals that came while it is entered. A second Ctrl-C abandons the step."""

    def __init__(self) -> None:
        self._came: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def flags(self) -> tuple[bool, ...]:
        """Whether each of SIGNALS came."""
        return tuple(number in self._came for number in SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came:
            raise KeyboardInterrupt
        self._came.add(number)
