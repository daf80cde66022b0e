"""Ranks of one machine talk over its loopback interface: no other machine reaches their stores or connections."""

import errno
import ipaddress
import os
import socket
from collections.abc import MutableMapping

import torch.distributed as dist

HOST = "127.0.0.1"
BACKLOG = 2048
INTERFACES = ("lo", "lo0")
"""Names of the loopback interface: Linux, macOS."""


def loopback_store() -> dist.TCPStore:
    """Keep a store in this process, on a free port of the loopback address.

    torch by itself listens on all interfaces, whatever address it is given.
    """
    listener = _bind_and_listen(socket.AF_INET, (HOST, 0))
    port = int(listener.getsockname()[1])
    # The store owns the descriptor from here on.
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def listen_at(address: str, port: int) -> socket.socket | None:
    """Listen at the address that the ranks meet at, if it is certain to be the one that they connect to.

    A number is, and so is "localhost". The name of a host may mean one interface to itself and another to the others:
    then, and for an address that this machine only has through a translation, the caller listens on all interfaces.

    Returns:
        The socket, or None where torch has to choose.

    Raises:
        OSError: something else listens at the port.
    """
    if address != "localhost" and not _is_ip_address(address):
        return None
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return _bind_and_listen(family, where)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def is_loopback(address: str) -> bool:
    """Return True for an address that only processes of this machine reach."""
    return address == "localhost" or (_is_ip_address(address) and ipaddress.ip_address(address).is_loopback)


def restrict_to_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL connect over the loopback interface, unless the user has chosen another.

    gloo else takes the interface of the host's name, which may be one of the network.
    """
    present = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in INTERFACES if name in present), None)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)


def _is_ip_address(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _bind_and_listen(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last connections are in their final wait is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
