"""Run one trial of a fault: start jobs, and measure the time to the message and to the first step after recovery."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.agents import Job, free_port
from tests.e2e.command import small

TIMEOUT_S = 5
COMMON = (
    "parallel.elastic=true",
    "run.dtype=float64",
    "checkpoint.every=4",
    "run.steps=100000",
    "checkpoint.keep=2",
    f"faults.timeout_s={TIMEOUT_S}",
)
FIRST_STEPS = 9
WAIT_TIMEOUT_S = 90.0


@dataclass
class RecoveryTimes:
    """Times of one trial, in seconds."""

    message_s: float
    """From the fault to the error message."""
    recovery_s: float
    """From the fault to the first step after the loaded checkpoint."""
    command_s: float | None = None
    """Part of `recovery_s` since the command that restarted the job, or None if the job recovered without a command."""


class FaultTrial:
    """One trial: its folder and the jobs that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.jobs: list[Job] = []

    def start(self, *overrides: str, prefix: Sequence[str] = (sys.executable,), **variables: str) -> Job:
        """Start a job with the recipe `small`, COMMON and `overrides`."""
        command = [*prefix, "-m", "moefold", *small(self.run_dir, *COMMON, *overrides)]
        job = Job(command, self.folder / f"{len(self.jobs)}.log", **variables)
        self.jobs.append(job)
        return job

    def srun(self, *ranks: int, timeout_s: int = 30, overrides: Sequence[str] = ()) -> list[Job]:
        """Start some of two ranks as srun does: independent processes without a launcher that monitors them.

        On a busy machine one rank may start many seconds after the other, so `timeout_s` is long.
        """
        port = str(free_port())
        common = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self.start(
                f"faults.timeout_s={timeout_s}", *overrides, **common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)
            )
            for rank in ranks
        ]

    def wait(self, condition: Callable[[], bool], poll_s: float = 0.01) -> float:
        """Wait until the condition holds and return the time."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(job.text() for job in self.jobs))
            time.sleep(poll_s)
        return time.time()

    def wait_for_steps(self, more_than: int = FIRST_STEPS) -> float:
        """Wait for the first step after step `more_than` and return the time."""
        return self.wait(lambda: self.steps() > more_than)

    def wait_for_both_nodes(self) -> None:
        """Wait until two ranks have trained some steps: the first starts without the second if that joins late."""

        def num_ranks() -> int:
            with suppress(FileNotFoundError, ValueError):
                return int(json.loads((self.run_dir / "config.json").read_text())["parallel"]["world_size"])
            return 0

        self.wait(lambda: num_ranks() == 2)
        self.wait_for_steps(max(FIRST_STEPS, self.steps() + 1))

    def steps(self) -> int:
        """Return the last step in metrics.jsonl."""
        with suppress(FileNotFoundError):
            # The last line may be incomplete.
            complete, _, _ = (self.run_dir / "metrics.jsonl").read_text().rpartition("\n")
            return int(json.loads(complete.splitlines()[-1])["step"]) if complete else 0
        return 0

    def wait_for_output(self, pattern: str, jobs: Sequence[Job]) -> float:
        """Wait until the output of one of the jobs matches the pattern and return the time."""
        return self.wait(lambda: any(re.search(pattern, job.text()) for job in jobs))

    def measure_recovery(
        self, fault_s: float, pattern: str, jobs: Sequence[Job], restart: Callable[[], Sequence[Job]] | None = None
    ) -> RecoveryTimes:
        """Wait for the error message and for the first step after the job resumed.

        Args:
            fault_s: time of the fault.
            pattern: regular expression of the error message.
            jobs: jobs that print it, and that resume unless `restart` is given.
            restart: restarts the job after the processes of `jobs` have ended; returns the new jobs.
        """
        message_s = self.wait_for_output(pattern, jobs) - fault_s
        restarted_s = None
        if restart is not None:
            self.wait(lambda: all(job.process.poll() is not None for job in jobs))
            restarted_s = time.time()
            jobs = restart()
        self.wait_for_output("resumed from", jobs)
        # The run removes the lines after the checkpoint before it prints this.
        resumed_s = self.wait_for_steps(self.steps())
        return RecoveryTimes(message_s, resumed_s - fault_s, None if restarted_s is None else resumed_s - restarted_s)

    def measure_regroup(self, fault_s: float, jobs: Sequence[Job]) -> RecoveryTimes:
        """Wait until the ranks that are left have regrouped, and for the first step after it."""
        message_s = self.wait_for_output("lost rank", jobs)
        # The run removes the lines after the restored step before it prints this.
        self.wait_for_output("regrouped in", jobs)
        return RecoveryTimes(message_s - fault_s, self.wait_for_steps(self.steps()) - fault_s)

    def measure_continuation(self, fault_s: float, pattern: str, job: Job) -> RecoveryTimes:
        """Wait for the message and for the next step of a job that continues."""
        message_s = self.wait_for_output(pattern, [job])
        return RecoveryTimes(message_s - fault_s, self.wait_for_steps(self.steps()) - fault_s)

    def newest_checkpoint(self) -> Path:
        """Return the complete checkpoint with the highest step."""
        return sorted((self.run_dir / "checkpoints").glob("step-*"))[-1]
