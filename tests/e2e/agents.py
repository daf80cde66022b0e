"""Nodes of a job as torchrun sees them: each an agent of its own, which can be killed as a machine dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.e2e.command import ROOT, environment

QUICK = "join_timeout=60,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=2"
"""torch notices that a node is gone, and stops waiting for further ones, in seconds instead of half a minute."""


class Agent:
    """torchrun on one node, and its ranks; what they print goes into a file."""

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
        self.log = log
        with log.open("w") as opened:
            self.process = subprocess.Popen(
                [*prefix, *torchrun, "--rdzv-id=moefold", "-m", "moefold", *words],
                stdout=opened,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment() | variables,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the agent and its ranks as if the power went."""
        # torchrun gives each rank a session of its own.
        for process in [self.process.pid, *_children(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        """All that was printed so far."""
        return self.log.read_text()


def _children(process: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    found = [int(word) for word in listed.stdout.split()]
    return [*found, *(below for child in found for below in _children(child))]


def wait_for(is_so: Callable[[], bool], agents: Sequence[Agent], timeout_s: float = 120.0) -> float:
    """Wait until something holds; returns the time at which it did. Fails with what the agents printed."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(agent.text() for agent in agents)
        time.sleep(0.02)
    return time.time()
