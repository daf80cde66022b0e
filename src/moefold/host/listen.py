"""Listening sockets of HTTP servers, limits of their connections, and names of the loopback interface."""

import errno
import ipaddress
import os
import resource
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

from moefold.errors import ConfigError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]", "[")
"""Host headers for `LOOPBACK_NAMES`. starlette before 1.0 cuts an IPv6 address at its first colon."""
BACKLOG = 128
MAX_PORT = 2**16 - 1


def is_loopback(host: str) -> bool:
    """Return whether a name or an address belongs to the loopback interface, which only this machine can reach."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_port(port: int) -> None:
    """Check the number of a port. Raise ConfigError if it is not in [0, 65535]."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port} must lie in [0, {MAX_PORT}] (0: any that is free)")


def free_port(host: str = "") -> int:
    """Return a port that is free on an interface. "": on all interfaces."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: name or address of this machine. `::` stands for all addresses, IPv4 and IPv6.
        port: 0 for any free port.

    Raises:
        ConfigError: the address is not one of this machine, or the port is in use.
    """
    try:
        # A name may have several addresses; IPv4 is preferred, as clients of "localhost" try both.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
        # The address :: stands for all addresses, IPv4 addresses included.
        is_dual = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        # socket.create_server appends the address to the reason.
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({reason}); choose another port, or "
            "an address of this machine"
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


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
    """Limit of the connections of a listener: it closes the oldest silent connection if there are too many."""

    def __init__(self, log: Callable[[str], None], max_connections: int | None = None) -> None:
        """Raise the limit of descriptors of this process.

        Args:
            log: called with each line of the log, at most once in `LOG_INTERVAL_S` for a reason.
        """
        self.max_connections = most_connections() if max_connections is None else max_connections
        self._log = log
        self._logged_s: dict[str, float] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._num_sockets = 0
        self._silent: dict[object, Callable[[], None]] = {}

    def add_silent(self, connection: object, close: Callable[[], None]) -> None:
        """Add a connection that has sent no request, or none after its last answer. `close` ends it."""
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
        """Return whether one more connection is allowed. If not, close the oldest silent connection."""
        if self._num_sockets >= self.max_connections:
            self._num_sockets = sum(sock.fileno() >= 0 for sock in self._sockets)
        if self._num_sockets < self.max_connections:
            return True
        self.log_once("full", f"{self.max_connections} connections are open, the most that this server takes")
        return False

    def close_oldest(self) -> bool:
        """Close the oldest silent connection, and return whether there was such a connection."""
        if not self._silent:
            return False
        self._silent.pop(next(iter(self._silent)))()
        return True

    def log_once(self, reason: str, line: str) -> None:
        """Log a line, unless a line of this reason was logged a short time ago."""
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
    """Listening socket whose `accept` applies the limits of a guard. asyncio calls it."""

    def __init__(self, listener: socket.socket, guard: ConnectionGuard) -> None:
        """Take over a listening socket. This object closes it."""
        super().__init__(fileno=listener.detach())
        self._guard = guard
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: there is no connection, or it was refused, or another connection is closed first.
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
            # It was closed by itself, or there are still no descriptors.
            return


def most_connections() -> int:
    """Raise the limit of open files as far as this process may, and return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
        soft = descriptors
    limit = MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    num_open = len(os.listdir("/dev/fd"))
    return max(8, min(MOST_CONNECTIONS, limit - num_open - SPARE_DESCRIPTORS))
