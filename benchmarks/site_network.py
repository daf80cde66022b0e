"""Sites on network namespaces of this machine: hosts around a switch. Needs root. Changes nothing outside of them."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEVICE = "cable0"
"""Name of the network device of a host."""
SWITCH = "10.215.0.254"
"""Address of the switch, where the meeting point runs."""
PORT = 29600
"""Port of a meeting point on a host."""


def ip(*words: str) -> None:
    """Run the command ip."""
    subprocess.run(["ip", *words], check=True)


def host_address(number: int) -> str:
    """Return the address of a host, from 0."""
    return f"10.215.{number + 1}.2"


@contextmanager
def switch(count: int) -> Iterator[list[str]]:
    """Create namespaces of hosts that are joined through a switch; yield their names, the name of the switch last."""
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


@contextmanager
def meeting_point(host: str, folder: Path) -> Iterator[Path]:
    """Run a meeting point on a host and yield the file of its secret."""
    secret = folder / "secret.txt"
    secret.write_text(secrets.token_hex(32))
    secret.chmod(0o600)
    words = ["meet", "--host", host_address(0), "--port", str(PORT), "--secret", str(secret)]
    process = start(host, ["-m", "moefold", *words], folder / "meet.log")
    try:
        yield secret
    finally:
        process.terminate()
        process.wait()


def wait_for(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for the ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    statuses = [process.wait(1200) for process in processes]
    if any(statuses):
        raise RuntimeError("\n".join(path.read_text() for path in sorted(folder.glob("*.log"))))


def run_sites(hosts: Sequence[str], recipe: Path, words: Sequence[str], folder: Path) -> None:
    """Train a site on each host, with run folders and logs in a folder."""
    with meeting_point(hosts[0], folder) as secret:
        processes = []
        for number, host in enumerate(hosts):
            site_words = (f"sites.number={number}", f"run.dir={folder / f'site-{number}'}")
            shared = (f"sites.meet={host_address(0)}:{PORT}", f"sites.secret={secret}")
            train = ["-m", "moefold", "train", str(recipe), *words, *shared, *site_words]
            processes.append(start(host, train, folder / f"site-{number}.log"))
        wait_for(processes, folder)


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
        """Return the longest time without a step, from a given time on."""
        times = [moment_s, *(time_s for time_s, _ in self.times if time_s > moment_s)]
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
