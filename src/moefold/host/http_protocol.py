"""HTTP server of uvicorn with limits: connections, time of headers, bodies and unread answers. Needs uvicorn."""

import asyncio
import copy
import logging
import socket
from typing import Any

import uvicorn
from h11 import SEND_BODY
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from moefold.host.listen import FIRST_WORDS_TIMEOUT_S, ConnectionGuard, GuardedListener
from moefold.terminal import print_escaped

BODY_TIMEOUT_S = 60.0
"""Time limit for the body of a request."""
UNREAD_ANSWER_TIMEOUT_S = 60.0
"""Longest wait for a client that does not read its answer."""
LINGER_S = 2.0
"""Time for discarding the rest of a refused body, so that the client reads the reason."""
LINGER_BYTES = 16 << 20


def make_server(
    app: Any, listener: socket.socket, *, max_connections: int | None = None, **timeouts: float
) -> tuple[uvicorn.Server, list[socket.socket]]:
    """Return a server with limits, and the sockets to run it with.

    Args:
        listener: listening socket, which is taken over.
        timeouts: timeouts of a connection, by the names of `GuardedProtocol`'s arguments.
    """
    guard = ConnectionGuard(lambda line: print_escaped(f"moefold: {line}", flush=True), max_connections)

    def protocol(**keywords: Any) -> GuardedProtocol:
        return GuardedProtocol(guard, keywords, **timeouts)

    logs = copy.deepcopy(LOGGING_CONFIG)
    logs["filters"] = {"once": {"()": lambda: _RepeatedWarningFilter(guard)}}
    logs["handlers"]["default"]["filters"] = ["once"]
    # asyncio's own loop: another event loop would not call the listener's accept.
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="asyncio",
        log_config=logs,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    return uvicorn.Server(config), [GuardedListener(listener, guard)]


class GuardedProtocol(H11Protocol):  # type: ignore[misc]  # uvicorn is optional
    """HTTP connection that is closed when its request does not come, or its answer is not read."""

    def __init__(
        self,
        guard: ConnectionGuard,
        keywords: dict[str, Any],
        *,
        header_s: float = FIRST_WORDS_TIMEOUT_S,
        body_s: float = BODY_TIMEOUT_S,
        unread_s: float = UNREAD_ANSWER_TIMEOUT_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """Create the protocol of one connection."""
        super().__init__(**keywords)
        self._guard = guard
        self._times = {"header": header_s, "body": body_s, "linger": linger_s}
        self._unread_s = unread_s
        self._phase = "new"
        self._last_cycle: object = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer of the first header."""
        super().connection_made(transport)
        self._start_phase("header")

    def data_received(self, data: bytes) -> None:
        """Pass data on, and start the timer of the next data."""
        if self._phase == "linger":
            self._num_discarded += len(data)
        if self._phase == "idle":
            self._start_phase("header")
        if self._num_discarded > LINGER_BYTES:
            self._abort()
            return
        super().data_received(data)
        self._update_phase()

    def on_response_complete(self) -> None:
        """Start a short timer for the rest of an unread body."""
        super().on_response_complete()
        self._update_phase()

    def pause_writing(self) -> None:
        """Start the timer of an unread answer."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self._unread_s, self._abort)

    def resume_writing(self) -> None:
        """Stop the timer of an unread answer."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._start_phase("done")
        super().connection_lost(exc)

    def _update_phase(self) -> None:
        """Enter the phase that uvicorn has reached."""
        if self._phase == "done" or (self._phase == "header" and self.cycle is self._last_cycle):
            return
        self._last_cycle = self.cycle
        needs_more = self.conn.their_state is SEND_BODY
        if self.cycle.response_complete:
            self._start_phase("linger" if needs_more else "idle")
        else:
            self._start_phase("body" if needs_more else "answer")

    def _start_phase(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if phase in ("header", "idle"):
            self._guard.add_silent(self, self._abort)
        else:
            self._guard.remove_silent(self)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self._times[phase], self._abort) if phase in self._times else None

    def _abort(self) -> None:
        self.transport.abort()


class _RepeatedWarningFilter(logging.Filter):
    """Filter of uvicorn's log: a client may cause the same warning any number of times."""

    def __init__(self, guard: ConnectionGuard) -> None:
        super().__init__()
        self._guard = guard

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether no such record was logged a short time ago."""
        kind = record.exc_info[0] if record.exc_info else None
        return self._guard.is_due(f"{record.msg} {kind}")
