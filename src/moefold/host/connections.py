"""Limits of a server's connections: fewer than the descriptors, and none that stays silent. Torch-free.

Without them, a client that opens connections and says nothing takes all descriptors, and asyncio then logs a traceback
for each connection that it cannot accept.
"""

import errno
import os
import resource
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

MOST_DESCRIPTORS = 1 << 16
"""Limit of open files that a server asks for."""
MOST_CONNECTIONS = 1 << 14
SPARE_DESCRIPTORS = 64
"""Descriptors left for files."""
FIRST_WORDS_TIMEOUT_S = 10.0
"""Longest wait for the first request of a connection."""
LOG_INTERVAL_S = 60.0
"""Shortest time between two lines of the log that say the same."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionGuard:
    """Limit of the connections of a listener: the oldest silent one is closed where a new one would be too many."""

    def __init__(self, log: Callable[[str], None], most: int | None = None) -> None:
        """Raise the limit of descriptors of this process.

        Args:
            log: called with each line of the log, at most once in `LOG_INTERVAL_S` for a reason.
            most: most connections; None for what the descriptors allow.
        """
        self.most = most_connections() if most is None else most
        self._log = log
        self._logged_s: dict[str, float] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._num_sockets = 0
        self._silent: dict[object, Callable[[], None]] = {}

    def add_silent(self, connection: object, close: Callable[[], None]) -> None:
        """Add a connection that has sent no request, or none after its last answer; `close` ends it."""
        self._silent.pop(connection, None)
        self._silent[connection] = close

    def remove_silent(self, connection: object) -> None:
        """Remove a connection that has sent a request, or has ended."""
        self._silent.pop(connection, None)

    def add_socket(self, accepted: socket.socket) -> None:
        """Count a new connection."""
        self._sockets.add(accepted)
        self._num_sockets += 1

    def make_room(self) -> bool:
        """Return whether one more connection is allowed; where not, close the oldest silent one."""
        if self._num_sockets >= self.most:
            self._num_sockets = sum(each.fileno() >= 0 for each in self._sockets)
        if self._num_sockets < self.most:
            return True
        self.log_once("full", f"{self.most} connections are open, the most that this server takes")
        return False

    def close_oldest(self) -> bool:
        """Close the oldest silent connection; return whether there is one."""
        if not self._silent:
            return False
        self._silent.pop(next(iter(self._silent)))()
        return True

    def log_once(self, reason: str, line: str) -> None:
        """Log a line, unless one of this reason was logged a short time ago."""
        if self.is_due(reason):
            self._log(line)

    def is_due(self, reason: str) -> bool:
        """Return whether nothing of this reason was logged a short time ago, and count it as logged now."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(reason, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        self._logged_s[reason] = now_s
        return True


class GuardedListener(socket.socket):
    """Listening socket whose `accept` keeps to the limits of a guard; asyncio calls it."""

    def __init__(self, listener: socket.socket, guard: ConnectionGuard) -> None:
        """Take over a listening socket, which is closed by this one."""
        super().__init__(fileno=listener.detach())
        self._guard = guard
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: there is none, or it was refused, or another one is closed first.
        """
        if not self._guard.make_room():
            if self._guard.close_oldest():
                # Its descriptor is free at the next turn of the event loop, and the new connection waits until then.
                raise BlockingIOError
            self._refuse()
            raise BlockingIOError
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._guard.log_once("exhausted", f"a connection is refused: {error.strerror}")
            # Without an accept, the event loop would find the connection again and again.
            os.close(self._spare)
            self._refuse()
            self._spare = os.open(os.devnull, os.O_RDONLY)
            raise BlockingIOError from None
        self._guard.add_socket(accepted)
        return accepted, address

    def close(self) -> None:
        """Close the socket."""
        if self.fileno() >= 0:
            os.close(self._spare)
        super().close()

    def _refuse(self) -> None:
        try:
            super().accept()[0].close()
        except OSError:
            # It has gone by itself, or there are still no descriptors.
            return


def most_connections() -> int:
    """Raise the limit of open files as far as this process may; return the connections that it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    num_open = len(os.listdir("/dev/fd"))
    return max(8, min(MOST_CONNECTIONS, limit - num_open - SPARE_DESCRIPTORS))
