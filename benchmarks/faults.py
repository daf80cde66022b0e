"""From a fault to the message that names it, and to training again: one row a fault, as a table for docs/failures.md.

    PYTHONPATH=. python benchmarks/faults.py                    all of them, some minutes on 2 cores
    PYTHONPATH=. python benchmarks/faults.py --only "cut|SIGSTOP"     those whose name matches
    PYTHONPATH=. python benchmarks/faults.py --repeats 3        each so often; quartiles need more

Seconds count from the fault until the message is on stderr, and until a step after the last checkpoint is in
metrics.jsonl. Where nothing starts the job again by itself, the same command does, as soon as its processes are gone.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.agents import QUICK, agent_on_host, obstacle_to_namespaces, two_hosts
from tests.e2e.command import ROOT, child_ids, environment, small

TIMEOUT_S = 5
COMMON = (
    "parallel.elastic=true",
    "run.dtype=float64",
    "checkpoint.every=4",
    "run.steps=100000",
    "checkpoint.keep=2",
    f"faults.timeout_s={TIMEOUT_S}",
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FIRST_STEPS = 9
PATIENCE_S = 90.0


class _Job:
    """Some processes that train, and what they print."""

    def __init__(self, command: Sequence[str], folder: Path, **variables: str) -> None:
        self.log = folder / f"{len(list(folder.glob('*.log')))}.log"
        with self.log.open("w") as opened:
            self.process = subprocess.Popen(
                command,
                stdout=opened,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment() | variables,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        for process in [*_below(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


@dataclass
class _Found:
    """Seconds since the fault; None where there was none to be seen."""

    message_s: float | None
    again_s: float | None


class _Watch:
    """One trial: its folder, and the jobs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.jobs: list[Any] = []

    def start(self, *words: str, prefix: Sequence[str] = (sys.executable,), **variables: str) -> _Job:
        """Start a job with the usual recipe and further words."""
        command = [*prefix, "-m", "moefold", *small(self.run_dir, *COMMON, *words)]
        job = _Job(command, self.folder, **variables)
        self.jobs.append(job)
        return job

    def wait(self, is_so: Callable[[], bool]) -> float:
        """The moment from which on it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(job.text() for job in self.jobs))
            time.sleep(0.01)
        return time.time()

    def wait_for_steps(self, more_than: int = FIRST_STEPS) -> float:
        return self.wait(lambda: self.steps() > more_than)

    def steps(self) -> int:
        """The last step that was written."""
        with suppress(FileNotFoundError):
            # The last line may be half written.
            whole, _, _ = (self.run_dir / "metrics.jsonl").read_text().rpartition("\n")
            return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0
        return 0

    def after(self, fault_s: float, words: str, jobs: Sequence[Any], restart: Callable[[], Any] | None) -> _Found:
        """Wait for a message and for a step after the resume, by `restart` where nothing else starts it again."""
        message_s = self.wait(lambda: any(words in job.text() for job in jobs)) - fault_s
        if restart is not None:
            self.wait(lambda: jobs[0].process.poll() is not None)
            jobs = [restart()]
        self.wait(lambda: any("resumed from" in job.text() for job in jobs))
        # The lines behind the checkpoint were removed before this was printed.
        return _Found(message_s, self.wait_for_steps(self.steps()) - fault_s)


def _below(process: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    found = [int(word) for word in listed.stdout.split()]
    return [*found, *(below for child in found for below in _below(child))]


def _own_launcher(sent: signal.Signals, words: str) -> Callable[[_Watch], _Found]:
    four = ("parallel.world_size=4", "parallel.tp=2", "parallel.ep=2")

    def trial(watch: _Watch) -> _Found:
        job = watch.start(*four)
        watch.wait_for_steps()
        os.kill(child_ids(job.process.pid)[2], sent)
        return watch.after(time.time(), words, [job], lambda: watch.start(*four))

    return trial


def _torchrun(sent: signal.Signals, words: str) -> Callable[[_Watch], _Found]:
    prefix = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1")

    def trial(watch: _Watch) -> _Found:
        job = watch.start(prefix=prefix)
        watch.wait_for_steps()
        os.kill(child_ids(job.process.pid)[1], sent)
        return watch.after(time.time(), words, [job], None)

    return trial


def _cut_off(watch: _Watch) -> _Found:
    words = small(watch.run_dir, *COMMON)
    with two_hosts() as names:
        watch.jobs += [agent_on_host(name, number, words, watch.folder) for number, name in enumerate(names, 1)]
        watch.wait_for_steps()
        fault_s = time.time()
        subprocess.run(["ip", "-n", names[1], "link", "set", "cable0", "down"], check=True)
        try:
            return watch.after(fault_s, "is not heard any more", watch.jobs[:1], None)
        finally:
            for job in watch.jobs:
                job.kill()


KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
FAULTS: dict[str, tuple[Callable[[_Watch], _Found], str]] = {
    "rank killed, own launcher (4 ranks)": (_own_launcher(KILLED, "was killed by SIGKILL"), "the same command"),
    "rank killed, torchrun on one node (2 ranks)": (_torchrun(KILLED, "is gone"), "torchrun"),
    "rank stopped by SIGSTOP, own launcher (4 ranks)": (_own_launcher(STOPPED, "is stopped"), "the same command"),
    "rank stopped by SIGSTOP, torchrun on one node (2 ranks)": (_torchrun(STOPPED, "is stopped"), "torchrun"),
    "host cut off (link down), torchrun, goes on with the other": (_cut_off, "torchrun"),
}


def _try(trial: Callable[[_Watch], _Found]) -> _Found | str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        watch = _Watch(Path(folder))
        try:
            return trial(watch)
        except (TimeoutError, subprocess.CalledProcessError) as error:
            return str(error)[-2000:]
        finally:
            for job in watch.jobs:
                job.kill()


def _seconds(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return "-" if not known else f"{known[0]:.1f} s" if len(known) == 1 else f"{known[0]:.1f} to {known[-1]:.1f} s"


def main() -> None:
    """Try each fault and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    print(f"faults.timeout_s={TIMEOUT_S}; torchrun with --rdzv-conf {QUICK} where nodes may go")
    print("| fault | message after | training again after | by |\n| --- | --- | --- | --- |", flush=True)
    for name, (trial, by) in FAULTS.items():
        if not re.search(args.only, name):
            continue
        if "cut off" in name and (obstacle := obstacle_to_namespaces()):
            print(f"| {name} | not tried: {obstacle} | | |", flush=True)
            continue
        found = [_try(trial) for _ in range(args.repeats)]
        times = [one for one in found if isinstance(one, _Found)]
        row = f"{_seconds([one.message_s for one in times])} | {_seconds([one.again_s for one in times])}"
        print(f"| {name} | {row} | {by} |", flush=True)
        for failure in (one for one in found if isinstance(one, str)):
            print(f"FAILED: {failure}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
