"""Listening sockets of HTTP servers, and the names of the loopback interface. Torch-free."""

import ipaddress
import socket

from moefold.errors import ConfigError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]", "[")
"""Host headers for them; starlette before 1.0 cuts an IPv6 address at its first colon."""
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
    """Check the number of a port; raise ConfigError if it is not in [0, 65535]."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port} must lie in [0, {MAX_PORT}] (0: any that is free)")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: name or address of this machine; `::` stands for all addresses, IPv4 and IPv6.
        port: 0 for any that is free.

    Raises:
        ConfigError: the address is not one of this machine, or the port is in use.
    """
    try:
        # A name may have several addresses; IPv4 is preferred, as clients of "localhost" try both.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
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
