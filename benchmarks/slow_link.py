"""Two network namespaces that are joined by a link of limited rate and added latency.

Needs root for `ip netns`, and /dev/net/tun; nothing outside of the namespaces is changed. It does not use `tc netem`,
which delays packets, because some kernels lack it.
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.site_network import DEVICE, host_address, ip

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_PACKET_BYTES = 2**16


@contextmanager
def slow_link(bytes_per_s: float, latency_s: float, queue_s: float = 1.0) -> Iterator[list[str]]:
    """Create the namespaces of two hosts and the link between them, and yield their names.

    A thread for each direction reads packets from the TUN device of a host, and writes them to the device of the other
    host when a link of that rate and latency would deliver them.

    Args:
        bytes_per_s: rate of each direction.
        latency_s: added time of a packet, in each direction.
        queue_s: packets that would wait longer than this in the queue are dropped.
    """
    hosts = [f"moefold{os.getpid()}h{number}" for number in range(2)]
    devices: list[int] = []
    threads: list[threading.Thread] = []
    stop = threading.Event()
    try:
        for number, name in enumerate(hosts):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            devices.append(_open_tun(name))
            ip("-n", name, "addr", "add", host_address(number), "peer", host_address(1 - number), "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
        for source, target in (devices, reversed(devices)):
            direction = _Direction(source, target, bytes_per_s, latency_s, queue_s)
            threads.append(threading.Thread(target=direction.run, args=(stop,), daemon=True))
            threads[-1].start()
        yield hosts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for device in devices:
            os.close(device)
        for name in hosts:
            subprocess.run(["ip", "netns", "del", name], check=False)


def sent_bytes(namespace: str) -> int:
    """Return the bytes that a host has sent over the link, with the headers of TCP, from /proc/net/dev."""
    table = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True
    ).stdout
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{DEVICE}:"))
    return int(line.split(":")[1].split()[8])


def _open_tun(namespace: str) -> int:
    """Create the TUN device of a namespace, and return its file descriptor."""
    descriptors: list[int] = []

    def create() -> None:
        # A namespace belongs to a thread; this one ends.
        with Path(f"/run/netns/{namespace}").open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN_NO_PI))
        descriptors.append(descriptor)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    return descriptors[0]


class _Direction:
    """One direction of the link."""

    def __init__(self, source: int, target: int, bytes_per_s: float, latency_s: float, queue_s: float) -> None:
        self._source = source
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._queue_s = queue_s
        self._free_s = 0.0
        self._packets: deque[tuple[float, bytes]] = deque()

    def run(self, stop: threading.Event) -> None:
        """Forward packets until told to stop."""
        while not stop.is_set():
            wait_s = 0.1
            if self._packets:
                wait_s = min(wait_s, max(0.0, self._packets[0][0] - time.monotonic()))
            if select.select([self._source], [], [], wait_s)[0]:
                self._read()
            while self._packets and self._packets[0][0] <= time.monotonic():
                os.write(self._target, self._packets.popleft()[1])

    def _read(self) -> None:
        packet = os.read(self._source, _MAX_PACKET_BYTES)
        now_s = time.monotonic()
        begin_s = max(now_s, self._free_s)
        if begin_s - now_s <= self._queue_s:
            self._free_s = begin_s + len(packet) / self._bytes_per_s
            self._packets.append((self._free_s + self._latency_s, packet))
