"""Jobs and torchrun agents in subprocesses; each agent acts as a node and can be killed like a failing machine."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.command import ROOT, environment
from tests.e2e.forked import kill_all, run_program, start_program

QUICK = "join_timeout=60,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5"
"""torchrun detects a lost node, and stops waiting for more nodes, within seconds instead of half a minute."""


class Job:
    """A process with its children, whose output goes to a file."""

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
        """Kill all processes at once, as a power failure would."""
        kill_all(self.process.pid)
        self.process.wait()

    def text(self) -> str:
        """Return the output so far."""
        return self.log.read_text()


class ForkedProcess:
    """A program forked from a process that has torch in memory, as `subprocess.Popen` shows it."""

    def __init__(self, program: str, words: Sequence[str], log: Path) -> None:
        self._process = start_program(program, words, [log, log], ROOT, environment())
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end and return its exit status; None: it goes on."""
        self._process.join(timeout_s)
        return self._process.exitcode


MOEFOLD = "import sys; from moefold.cli.main import main; sys.argv[0] = 'moefold'; sys.exit(main(sys.argv[1:]))"
"""Program of the command line."""
TORCHRUN = "from torch.distributed.run import main; main()"
"""Program of an agent that is forked: its ranks are processes of their own."""


class ForkedAgent(Job):
    """torchrun on one node that starts immediately, as it is forked, and its ranks."""

    def __init__(self, words: Sequence[str], log: Path, *, meet_at: str, num_ranks: int = 1) -> None:
        self.log = log
        log.touch()
        self.process = ForkedProcess(TORCHRUN, [*_torchrun_words(meet_at, num_ranks), *words], log)


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
        **variables: str,
    ) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *_torchrun_words(meet_at, local=local)]
        super().__init__([*prefix, *torchrun, *words], log, **variables)


def _torchrun_words(meet_at: str, num_ranks: int = 1, local: Sequence[str] = ()) -> list[str]:
    nodes = ["--nnodes=1:2", f"--nproc-per-node={num_ranks}", *local, "--max-restarts=3"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-conf={QUICK}", f"--rdzv-endpoint={meet_at}", "--rdzv-id=moefold"]
    return [*nodes, *meeting, "-m", "moefold"]


def run_on_ranks(
    words: Sequence[str], count: int, timeout_s: float = 240.0, *, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `moefold WORDS` to its end on ranks with torchrun's variables, but forked, without its agent and its imports.

    Args:
        words: after `moefold`.
        count: number of ranks.
        timeout_s: limit of each rank.
        before: statements that each rank executes first.

    Returns:
        Output of all ranks in rank order, and the largest exit status.
    """
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        variables = environment() | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_program(f"{before}\n{MOEFOLD}", *words, timeout_s=timeout_s, cwd=ROOT, environment=variables)

    with ThreadPoolExecutor(count) as threads:
        ranks = list(threads.map(run_rank, range(count)))
    status = max(done.returncode for done in ranks)
    output, errors = ("".join(getattr(done, stream) for done in ranks) for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(words), status, output, errors)


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Create two network namespaces joined by a veth pair; yield their names."""
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
    """Return why this machine cannot create network namespaces; empty if it can."""
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
    """Start torchrun on one of two hosts; the first one hosts the rendezvous.

    Args:
        name: network namespace.
        number: number of the host, from 1.
        words: command that torchrun runs.
        folder: folder of the log.
    """
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.213.0.1 node1\n10.213.0.2 node2\n")
    # Each host has its own name, which messages give, and can resolve the other's.
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
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(meet_at: str) -> bool:
    """Return whether a process listens at HOST:PORT."""
    host, port = meet_at.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_for(is_so: Callable[[], bool], agents: Sequence[Job], timeout_s: float = 120.0) -> float:
    """Wait until the condition holds and return the time; fail with the output of the agents."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(agent.text() for agent in agents)
        time.sleep(0.02)
    return time.time()
