"""Jobs, and nodes of one as torchrun sees them, each an agent of its own: they can be killed as a machine dies."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.command import ROOT, environment

QUICK = "join_timeout=60,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5"
"""torch notices that a node is gone, and stops waiting for further ones, in seconds instead of half a minute."""


class Job:
    """Processes of which one started the others, and what they print, which goes into a file."""

    def __init__(self, command: Sequence[str], log: Path, **variables: str) -> None:
        self.log = log
        with log.open("w") as opened:
            self.process = subprocess.Popen(
                command,
                stdout=opened,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment() | variables,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End them all as if the power went."""
        # torchrun gives each rank a session of its own.
        for process in [self.process.pid, *_children(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        """All that was printed so far."""
        return self.log.read_text()


class Agent(Job):
    """torchrun on one node, and its ranks."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        meet_at: str,
        prefix: Sequence[str] = (),
        local: Sequence[str] = (),
        num_ranks: int = 1,
        **variables: str,
    ) -> None:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1:2",
            f"--nproc-per-node={num_ranks}",
            *local,
        ]
        torchrun += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-conf={QUICK}", f"--rdzv-endpoint={meet_at}"]
        super().__init__([*prefix, *torchrun, "--rdzv-id=moefold", "-m", "moefold", *words], log, **variables)


def _children(process: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    found = [int(word) for word in listed.stdout.split()]
    return [*found, *(below for child in found for below in _children(child))]


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable; yields their names."""
    names = [f"moefold{os.getpid()}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def obstacle_to_namespaces() -> str:
    """Why this machine makes no network namespaces; empty if it does."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "the commands ip and unshare are missing"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"ip cannot: {error.stderr.strip()}"


def agent_on_host(name: str, number: int, words: Sequence[str], folder: Path) -> Agent:
    """torchrun on one of two hosts, which meet at the first of them.

    Args:
        name: of its network namespace.
        number: of the host, from 1.
        words: what it runs.
        folder: for what it prints.
    """
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.213.0.1 node1\n10.213.0.2 node2\n")
    # A host has a name of its own, which the message gives, and knows that of the other.
    naming = f'hostname node{number} && mount --bind {hosts} /etc/hosts && exec "$@"'
    rename = ("unshare", "--uts", "--mount", "sh", "-c", naming, "sh")
    return Agent(
        words,
        folder / f"{number}.log",
        meet_at="10.213.0.1:29400",
        prefix=("ip", "netns", "exec", name, *rename),
        local=(f"--local-addr=10.213.0.{number}",),
        GLOO_SOCKET_IFNAME="cable0",
    )


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(meet_at: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, port = meet_at.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_for(is_so: Callable[[], bool], agents: Sequence[Agent], timeout_s: float = 120.0) -> float:
    """Wait until something holds; returns the time at which it did. Fails with what the agents printed."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(agent.text() for agent in agents)
        time.sleep(0.02)
    return time.time()
