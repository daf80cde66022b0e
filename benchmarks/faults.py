"""From a fault to the message that names it, and to training again: one row a fault, as a table for docs/failures.md.

    PYTHONPATH=. python benchmarks/faults.py                    all of them, a quarter of an hour on 2 cores
    PYTHONPATH=. python benchmarks/faults.py --only "cut|SIGSTOP"     those whose name matches
    PYTHONPATH=. python benchmarks/faults.py --repeats 3        each so often; quartiles need more

Seconds count from the fault until the message is on stderr, and until a step after the last checkpoint is in
metrics.jsonl. Where nothing starts the job again by itself, the same command does, as soon as its processes are gone;
its own time stands apart. A tmpfs and two hosts need root; without it these rows say so.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fault_watch import COMMON, TIMEOUT_S, Found, Watch

from tests.e2e.agents import QUICK, Agent, Job, agent_on_host, free_port, is_open, obstacle_to_namespaces, two_hosts
from tests.e2e.command import child_ids, small

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
FOUR = ("parallel.world_size=4", "parallel.tp=2", "parallel.ep=2")
ODD_RANKS = Path(__file__).parent / "odd_ranks"
SHARDS = 4
TMPFS_BYTES = 2**26

Trial = Callable[[Watch], Found]


class CannotTryError(Exception):
    """This machine does not let the fault be made: no network namespaces, no mount."""


def _own_launcher(sent: signal.Signals, words: str) -> Trial:
    """Send a signal to one of four ranks that moefold started."""

    def trial(watch: Watch) -> Found:
        job = watch.start(*FOUR, PYTHONPATH=f"{ODD_RANKS}:{os.environ.get('PYTHONPATH', '')}")
        watch.wait_for_steps()
        os.kill(child_ids(job.process.pid)[2], sent)
        return watch.after(time.time(), words, [job], lambda: [watch.start(*FOUR)])

    return trial


def _torchrun(sent: signal.Signals, words: str) -> Trial:
    """Send a signal to one of two ranks that torchrun started, which starts them again."""

    def trial(watch: Watch) -> Found:
        job = watch.start(prefix=TORCHRUN)
        watch.wait_for_steps()
        os.kill(child_ids(job.process.pid)[1], sent)
        return watch.after(time.time(), words, [job])

    return trial


def _srun(killed: int, words: str) -> Trial:
    """Kill one of two ranks that nobody looks after; rank 0 keeps the store at which they meet."""

    def trial(watch: Watch) -> Found:
        jobs = watch.srun(0, 1)
        watch.wait_for_steps()
        jobs[killed].kill()
        return watch.after(time.time(), words, jobs, lambda: watch.srun(0, 1))

    return trial


def _never_came(watch: Watch) -> Found:
    """One of two ranks does not start when the job goes on from its checkpoint."""
    jobs = watch.srun(0, 1)
    watch.wait_for_steps()
    for job in jobs:
        job.kill()
    return watch.after(time.time(), "did not come to", watch.srun(0, timeout_s=TIMEOUT_S), lambda: watch.srun(0, 1))


def _preempted(watch: Watch) -> Found:
    job = watch.start(*FOUR)
    watch.wait_for_steps()
    job.process.send_signal(signal.SIGTERM)
    return watch.after(time.time(), "stopped by SIGTERM after step", [job], lambda: [watch.start(*FOUR)])


def _node(killed: int) -> Trial:
    """Kill one of two nodes, agent and rank; the first one keeps the rendezvous, and the job ends without it."""

    def trial(watch: Watch) -> Found:
        meet_at, words = f"127.0.0.1:{free_port()}", small(watch.run_dir, *COMMON)

        def nodes() -> list[Agent]:
            agents = []
            for number in range(2):
                log = watch.folder / f"node{number}-{len(watch.jobs)}.log"
                agents.append(Agent(words, log, meet_at=meet_at))
                watch.jobs.append(agents[-1])
                watch.wait(lambda: is_open(meet_at))
            return agents

        agents = nodes()
        watch.wait_for_both_nodes()
        fault_s = time.time()
        agents[killed].kill()
        restart = nodes if killed == 0 else None
        return watch.after(fault_s, r"docs/failures\.md", [agents[1 - killed]], restart)

    return trial


def _cut_off(watch: Watch) -> Found:
    if obstacle := obstacle_to_namespaces():
        raise CannotTryError(obstacle)
    words = small(watch.run_dir, *COMMON)
    with two_hosts() as names:
        watch.jobs += [agent_on_host(name, number, words, watch.folder) for number, name in enumerate(names, 1)]
        watch.wait_for_both_nodes()
        fault_s = time.time()
        subprocess.run(["ip", "-n", names[1], "link", "set", "cable0", "down"], check=True)
        try:
            return watch.after(fault_s, "is unreachable", watch.jobs[:1])
        finally:
            for job in watch.jobs:
                job.kill()


def _damaged(damage: Callable[[Path], None]) -> Trial:
    """Damage the newest checkpoint of a job whose power went; nobody looks at it before the same command does."""

    def trial(watch: Watch) -> Found:
        job = watch.start(*FOUR)
        watch.wait_for_steps()
        job.kill()
        damage(watch.newest_checkpoint())
        started_s = time.time()
        found = watch.after(started_s, "skipped a damaged checkpoint", [watch.start(*FOUR)])
        found.command_s = found.again_s
        return found

    return trial


def _flip_bytes(checkpoint: Path) -> None:
    with (checkpoint / "__2_0.distcp").open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(size_bytes // 2)
        flipped = bytes(byte ^ 0xFF for byte in file.read(8))
        file.seek(size_bytes // 2)
        file.write(flipped)


def _remove_experts(checkpoint: Path) -> None:
    """The file of a rank holds its share of the experts."""
    (checkpoint / "__1_0.distcp").unlink()


def _full_disk(watch: Watch) -> Found:
    disk = watch.folder / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", str(disk)]
    if (done := subprocess.run(mounted, capture_output=True, text=True, check=False)).returncode:
        raise CannotTryError(done.stderr.strip())
    words = (*FOUR, f"checkpoint.dir={disk / 'checkpoints'}")
    filler = disk / "filler"

    def make_room() -> list[Job]:
        filler.unlink()
        return [watch.start(*words)]

    try:
        job = watch.start(*words)
        watch.wait_for_steps()
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(2**16)):
                    pass
            except OSError:
                fault_s = time.time()
        return watch.after(fault_s, "cannot be written to", [job], make_room)
    finally:
        for job in watch.jobs:
            job.kill()
        # The processes are killed, and some may still be on their way out.
        watch.wait(lambda: subprocess.run(["umount", str(disk)], check=False, capture_output=True).returncode == 0)


def _vanished_in_a_save(watch: Watch) -> Found:
    folder, away = watch.run_dir / "checkpoints", watch.folder / "away"

    def bring_back() -> list[Job]:
        # What the run made in its place, if it came to that.
        if folder.exists():
            folder.rename(watch.folder / "made anew")
        away.rename(folder)
        return [watch.start(*FOUR)]

    job = watch.start(*FOUR)
    watch.wait_for_steps()
    watch.wait(lambda: any(folder.glob(".step-*.partial/__*")), pause_s=0.0005)
    folder.rename(away)
    return watch.after(time.time(), "cannot be written to|lacks what other ranks", [job], bring_back)


def _vanished_between_saves(watch: Watch) -> Found:
    folder = watch.run_dir / "checkpoints"
    job = watch.start(*FOUR)
    watch.wait_for_steps()
    newest = watch.newest_checkpoint()
    watch.wait(lambda: watch.newest_checkpoint() != newest, pause_s=0.0005)
    # The step behind it is written once the save is through, and the next save is three steps away.
    watch.wait_for_steps(int(watch.newest_checkpoint().name.removeprefix("step-")))
    folder.rename(watch.folder / "away")
    return watch.goes_on(time.time(), "is gone", job)


def _cut_data(corrupt: str) -> Trial:
    """Cut a token file to half of its size while the run reads it."""

    def trial(watch: Watch) -> Found:
        shards = watch.folder / "tokens"
        shards.mkdir()
        for number in range(SHARDS):
            ids = np.random.default_rng(number).integers(0, 200, 2**14)
            np.save(shards / f"{number}.npy", ids.astype(np.uint16))
        words = (*FOUR, "data.kind=tokens", f"data.path={shards}")
        job = watch.start(*words, f"data.corrupt={corrupt}")
        watch.wait_for_steps()
        os.truncate(shards / "1.npy", 2**14)
        fault_s = time.time()
        if corrupt == "skip":
            return watch.goes_on(fault_s, "left out data file", job)
        return watch.after(
            fault_s, "broke while the run read it", [job], lambda: [watch.start(*words, "data.corrupt=skip")]
        )

    return trial


KILLED, STOPPED, LATE, BLOCKED = signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2
THE_SAME = "the same command"
FAULTS: dict[str, tuple[Trial, str]] = {
    "rank killed, own launcher (4 ranks)": (_own_launcher(KILLED, "was killed by SIGKILL"), THE_SAME),
    "rank killed, torchrun on one node (2 ranks)": (_torchrun(KILLED, "is gone"), "torchrun"),
    "rank 1 killed, srun (2 ranks)": (_srun(1, "is gone"), THE_SAME),
    "rank 0, which keeps the store, killed, srun (2 ranks)": (_srun(0, "the store at .* does not answer"), THE_SAME),
    "rank stopped by SIGSTOP, own launcher (4 ranks)": (_own_launcher(STOPPED, "is stopped"), THE_SAME),
    "rank stopped by SIGSTOP, torchrun on one node (2 ranks)": (_torchrun(STOPPED, "is stopped"), "torchrun"),
    "rank late: its main thread sleeps, own launcher (4 ranks)": (_own_launcher(LATE, "is late"), THE_SAME),
    "rank inside the kernel, own launcher (4 ranks)": (_own_launcher(BLOCKED, "hangs inside the kernel"), THE_SAME),
    "rank that never starts, srun (1 of 2)": (_never_came, THE_SAME),
    "node killed, torchrun, goes on with the other": (_node(1), "torchrun"),
    "node killed that keeps torchrun's rendezvous": (_node(0), "the same commands"),
    "host cut off (link down), torchrun, goes on with the other": (_cut_off, "torchrun"),
    "SIGTERM, own launcher (4 ranks)": (_preempted, THE_SAME),
    "bytes flipped in the newest checkpoint, then a start": (_damaged(_flip_bytes), THE_SAME),
    "a file with experts removed from it, then a start": (_damaged(_remove_experts), THE_SAME),
    "disk of the checkpoints full (tmpfs)": (_full_disk, f"room, {THE_SAME}"),
    "folder of checkpoints vanishes in a save": (_vanished_in_a_save, f"the folder back, {THE_SAME}"),
    "folder of checkpoints vanishes between saves": (_vanished_between_saves, "the run goes on"),
    'token file cut under the run, data.corrupt="fatal"': (_cut_data("fatal"), "the command with data.corrupt=skip"),
    'token file cut under the run, data.corrupt="skip"': (_cut_data("skip"), "the run goes on"),
}


def _try(trial: Trial) -> Found | str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        watch = Watch(Path(folder))
        try:
            return trial(watch)
        except CannotTryError as obstacle:
            return f"not tried: {obstacle}"
        except (TimeoutError, subprocess.CalledProcessError) as error:
            return f"FAILED: {str(error)[-2000:]}"
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
    print(
        "| fault | message after | training again after | of it the command | by |\n" + "| --- " * 5 + "|", flush=True
    )
    for name, (trial, by) in FAULTS.items():
        if not re.search(args.only, name):
            continue
        tried = [_try(trial) for _ in range(args.repeats)]
        found = [one for one in tried if isinstance(one, Found)]
        columns = ([one.message_s for one in found], [one.again_s for one in found], [one.command_s for one in found])
        print(f"| {name} | {' | '.join(map(_seconds, columns))} | {by} |", flush=True)
        for failure in (one for one in tried if isinstance(one, str)):
            print(failure, file=sys.stderr, flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
