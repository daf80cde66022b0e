"""One trial of a fault: jobs that train, what they print, and the seconds until they say so and train again."""

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
PATIENCE_S = 90.0


@dataclass
class Found:
    """Seconds; None where there was none to be seen."""

    message_s: float
    """From the fault to the message."""
    again_s: float | None
    """From the fault to a step after the checkpoint that was loaded."""
    command_s: float | None = None
    """The part of it since the command that started the job again; None where no hand did."""


class Watch:
    """One trial: its folder, and the jobs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.jobs: list[Job] = []

    def start(self, *words: str, prefix: Sequence[str] = (sys.executable,), **variables: str) -> Job:
        """Start a job with the usual recipe and further words."""
        command = [*prefix, "-m", "moefold", *small(self.run_dir, *COMMON, *words)]
        job = Job(command, self.folder / f"{len(self.jobs)}.log", **variables)
        self.jobs.append(job)
        return job

    def srun(self, *ranks: int, timeout_s: int = 30) -> list[Job]:
        """Start some of two ranks as srun does: one process each, with nobody above them that would look after them.

        On a busy machine one may come many seconds behind the other, and is waited for so long.
        """
        port = str(free_port())
        common = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            self.start(f"faults.timeout_s={timeout_s}", **common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in ranks
        ]

    def wait(self, is_so: Callable[[], bool], pause_s: float = 0.01) -> float:
        """The moment from which on it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(job.text() for job in self.jobs))
            time.sleep(pause_s)
        return time.time()

    def wait_for_steps(self, more_than: int = FIRST_STEPS) -> float:
        """The moment of the first step beyond so many."""
        return self.wait(lambda: self.steps() > more_than)

    def wait_for_both_nodes(self) -> None:
        """Wait until two ranks have trained some steps: the first begins alone if the second one is slow to come."""

        def num_ranks() -> int:
            with suppress(FileNotFoundError, ValueError):
                return int(json.loads((self.run_dir / "config.json").read_text())["parallel"]["world_size"])
            return 0

        self.wait(lambda: num_ranks() == 2)
        self.wait_for_steps(max(FIRST_STEPS, self.steps() + 1))

    def steps(self) -> int:
        """The last step that was written."""
        with suppress(FileNotFoundError):
            # The last line may be half written.
            whole, _, _ = (self.run_dir / "metrics.jsonl").read_text().rpartition("\n")
            return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0
        return 0

    def wait_for_words(self, words: str, jobs: Sequence[Job]) -> float:
        """The moment at which one of the jobs has said what the pattern `words` finds."""
        return self.wait(lambda: any(re.search(words, job.text()) for job in jobs))

    def after(
        self, fault_s: float, words: str, jobs: Sequence[Job], restart: Callable[[], Sequence[Job]] | None = None
    ) -> Found:
        """Wait for a message and for a step after the resume.

        Args:
            fault_s: when it was.
            words: a pattern that finds the message.
            jobs: who says it, and trains again unless `restart` is given.
            restart: what a user does, once the processes of `jobs` are gone; returns the jobs that train again.
        """
        message_s = self.wait_for_words(words, jobs) - fault_s
        restarted_s = None
        if restart is not None:
            self.wait(lambda: all(job.process.poll() is not None for job in jobs))
            restarted_s = time.time()
            jobs = restart()
        self.wait_for_words("resumed from", jobs)
        # The lines behind the checkpoint were removed before this was printed.
        again_s = self.wait_for_steps(self.steps())
        return Found(message_s, again_s - fault_s, None if restarted_s is None else again_s - restarted_s)

    def goes_on(self, fault_s: float, words: str, job: Job) -> Found:
        """Wait for a message and for the step after it, of a job that does not end."""
        message_s = self.wait_for_words(words, [job])
        return Found(message_s - fault_s, self.wait_for_steps(self.steps()) - fault_s)

    def newest_checkpoint(self) -> Path:
        """The complete one of the last step."""
        return sorted((self.run_dir / "checkpoints").glob("step-*"))[-1]
