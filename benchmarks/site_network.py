"""Sites on network namespaces of this machine: hosts around a switch, and a slow link between two hosts.

Needs root for `ip netns`, and /dev/net/tun for the slow link. Nothing outside of the namespaces is changed.
"""

import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
DEVICE = "cable0"
"""Name of the network device of a host."""
SWITCH = "10.215.0.254"
"""Address of the switch, where the meeting point runs."""


def ip(*words: str) -> None:
    """Run the command ip."""
    subprocess.run(["ip", *words], check=True)


def host_address(number: int) -> str:
    """Return the address of a host, from 0."""
    return f"10.215.{number + 1}.2"


@contextmanager
def switch(count: int) -> Iterator[list[str]]:
    """Create namespaces of hosts that are joined through a switch; yield their names, that of the switch last."""
    hosts = [f"moefold{os.getpid()}h{number}" for number in range(count)]
    hub = f"moefold{os.getpid()}hub"
    try:
        for name in (*hosts, hub):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "addr", "add", f"{SWITCH}/32", "dev", "lo")
        subprocess.run(["ip", "netns", "exec", hub, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        for number, name in enumerate(hosts):
            port = port_of(number)
            ip("link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            gateway = f"10.215.{number + 1}.1"
            ip("-n", name, "addr", "add", f"{host_address(number)}/24", "dev", DEVICE)
            ip("-n", hub, "addr", "add", f"{gateway}/24", "dev", port)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", hub, "link", "set", port, "up")
            ip("-n", name, "route", "add", "default", "via", gateway)
        yield [*hosts, hub]
    finally:
        for name in (*hosts, hub):
            subprocess.run(["ip", "netns", "del", name], check=False)


def port_of(number: int) -> str:
    """Return the name of the switch's device for a host."""
    return f"port{number}"


@contextmanager
def slow_link(bytes_per_s: float, latency_s: float, queue_s: float = 0.2) -> Iterator[list[str]]:
    """Create namespaces of two hosts that are joined by a link of limited rate; yield their names.

    A thread for each direction reads packets from the TUN device of a host and writes them to that of the other one,
    when a link of that rate and latency would deliver them.

    Args:
        bytes_per_s: rate of each direction.
        latency_s: time that a packet takes in addition, in each direction.
        queue_s: packets beyond a queue of so many seconds are dropped.
    """
    hosts = [f"moefold{os.getpid()}h{number}" for number in range(2)]
    devices: list[int] = []
    stop = threading.Event()
    threads: list[threading.Thread] = []
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


def _open_tun(namespace: str) -> int:
    """Create the TUN device of a namespace, and return its file descriptor."""
    found: list[int] = []

    def create() -> None:
        # A namespace belongs to a thread; this one ends.
        with Path(f"/run/netns/{namespace}").open() as file:
            _set_namespace(file.fileno())
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN_NO_PI))
        found.append(descriptor)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    return found[0]


def _set_namespace(descriptor: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class _Direction:
    """One direction of a slow link."""

    def __init__(self, source: int, target: int, bytes_per_s: float, latency_s: float, queue_s: float) -> None:
        self._source = source
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._queue_s = queue_s
        self._free_s = 0.0
        self._packets: list[tuple[float, int, bytes]] = []
        self._count = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            wait_s = 0.1
            if self._packets:
                wait_s = min(wait_s, max(0.0, self._packets[0][0] - time.monotonic()))
            ready, _, _ = select.select([self._source], [], [], wait_s)
            if ready:
                self._read()
            while self._packets and self._packets[0][0] <= time.monotonic():
                os.write(self._target, heapq.heappop(self._packets)[2])

    def _read(self) -> None:
        packet = os.read(self._source, 2**16)
        now = time.monotonic()
        begin_s = max(now, self._free_s)
        if begin_s - now <= self._queue_s:
            self._free_s = begin_s + len(packet) / self._bytes_per_s
            self._count += 1
            heapq.heappush(self._packets, (self._free_s + self._latency_s, self._count, packet))


def device_bytes(namespace: str) -> tuple[int, int]:
    """Return the bytes that a host has received and sent, from /proc/net/dev."""
    table = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"], check=True, capture_output=True, text=True
    ).stdout
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{DEVICE}:"))
    numbers = line.split(":")[1].split()
    return int(numbers[0]), int(numbers[8])


def start(name: str, program: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a Python program in a network namespace."""
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, "PYTHONUNBUFFERED": "1"}
    with log.open("a") as opened:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *program],
            stdout=opened,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | variables,
        )


class StepTimes:
    """Thread that notes when each step of a run comes to its metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._stop = threading.Event()
        self.times: list[tuple[float, int]] = []
        """Time and number of each step, as they came."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def last(self) -> int:
        """Return the last step so far."""
        return self.times[-1][1] if self.times else 0

    def pause_after(self, moment_s: float) -> float:
        """Return the longest time without a step after a moment."""
        times = [moment_s, *(at for at, _ in self.times if at > moment_s)]
        return max((after - before for before, after in zip(times, times[1:], strict=False)), default=0.0)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            # A site that resumes writes the file again.
            if self._path.exists():
                complete, _, _ = self._path.read_bytes().rpartition(b"\n")
                step = json.loads(complete.splitlines()[-1])["step"] if complete else 0
                if step not in (0, self.last()):
                    self.times.append((time.time(), step))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
