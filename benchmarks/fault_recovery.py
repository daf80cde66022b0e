"""Measure the time from a fault to its error message and to recovery: the table of docs/failures.md.

    PYTHONPATH=. python benchmarks/fault_recovery.py                            all faults, 15 minutes on 2 cores
    PYTHONPATH=. python benchmarks/fault_recovery.py --only "truncated|SIGSTOP" faults whose name matches
    PYTHONPATH=. python benchmarks/fault_recovery.py --repeats 3                three trials of each

Times are from the fault until the message is on stderr, and until a step after the last checkpoint is in
metrics.jsonl. If nothing restarts the job, the same command is run as soon as its processes have ended, and its own
time is reported separately. The trials with a tmpfs or two hosts need root and are skipped without it.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from fault_trial import COMMON, TIMEOUT_S, FaultTrial, RecoveryTimes

from tests.e2e.agents import QUICK, Agent, Job, agent_on_host, free_port, is_open, obstacle_to_namespaces, two_hosts
from tests.e2e.command import child_ids, small

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
FOUR_RANKS = ("parallel.world_size=4", "parallel.tp=2", "parallel.ep=2")
FAULT_INJECTION = Path(__file__).parent / "fault_injection"
REGROUP = "faults.on_loss=regroup"
NUM_SHARDS = 4
TMPFS_BYTES = 2**26

TrialMain = Callable[[FaultTrial], RecoveryTimes]


class SkippedTrialError(Exception):
    """The fault cannot be injected on this machine: no network namespaces, no mount."""


def _own_launcher(sent: signal.Signals, message: str) -> TrialMain:
    """Send a signal to one of four ranks started by moefold."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        job = trial.start(*FOUR_RANKS, PYTHONPATH=f"{FAULT_INJECTION}:{os.environ.get('PYTHONPATH', '')}")
        trial.wait_for_steps()
        os.kill(child_ids(job.process.pid)[2], sent)
        return trial.measure_recovery(time.time(), message, [job], lambda: [trial.start(*FOUR_RANKS)])

    return run


def _eight_ranks(*overrides: str) -> TrialMain:
    """Kill one of eight ranks; with `faults.on_loss=regroup` the others continue."""
    overrides = ("parallel.world_size=8", "parallel.ep=2", "train.global_batch_size=8", *overrides)

    def run(trial: FaultTrial) -> RecoveryTimes:
        job = trial.start(*overrides)
        trial.wait_for_steps()
        os.kill(child_ids(job.process.pid)[2], signal.SIGKILL)
        fault_s = time.time()
        if REGROUP in overrides:
            return trial.measure_regroup(fault_s, [job])
        return trial.measure_recovery(fault_s, "was killed by SIGKILL", [job], lambda: [trial.start(*overrides)])

    return run


def _srun_regroups(trial: FaultTrial) -> RecoveryTimes:
    """Kill one of two ranks without a launcher. Rank 0, which hosts the store, continues without it."""
    jobs = trial.srun(0, 1, overrides=(REGROUP,))
    trial.wait_for_steps()
    fault_s = time.time()
    jobs[1].kill()
    return trial.measure_regroup(fault_s, jobs)


def _torchrun(sent: signal.Signals, message: str) -> TrialMain:
    """Send a signal to one of two ranks under torchrun, which restarts them."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        job = trial.start(prefix=TORCHRUN)
        trial.wait_for_steps()
        os.kill(child_ids(job.process.pid)[1], sent)
        return trial.measure_recovery(time.time(), message, [job])

    return run


def _srun(killed: int, message: str) -> TrialMain:
    """Kill one of two ranks without a launcher. Rank 0 hosts the rendezvous store."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        jobs = trial.srun(0, 1)
        trial.wait_for_steps()
        jobs[killed].kill()
        return trial.measure_recovery(time.time(), message, jobs, lambda: trial.srun(0, 1))

    return run


def _missing_rank(trial: FaultTrial) -> RecoveryTimes:
    """Resume a job of two ranks; one of them does not start."""
    jobs = trial.srun(0, 1)
    trial.wait_for_steps()
    for job in jobs:
        job.kill()
    return trial.measure_recovery(
        time.time(), "did not come to", trial.srun(0, timeout_s=TIMEOUT_S), lambda: trial.srun(0, 1)
    )


def _preempted(trial: FaultTrial) -> RecoveryTimes:
    job = trial.start(*FOUR_RANKS)
    trial.wait_for_steps()
    job.process.send_signal(signal.SIGTERM)
    return trial.measure_recovery(
        time.time(), "stopped by SIGTERM after step", [job], lambda: [trial.start(*FOUR_RANKS)]
    )


def _node_killed(killed: int) -> TrialMain:
    """Kill one of two nodes, agent and rank. The first one hosts the rendezvous, and the job ends without it."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        endpoint = f"127.0.0.1:{free_port()}"
        command = small(trial.run_dir, *COMMON)

        def start_nodes() -> list[Agent]:
            agents = []
            for number in range(2):
                log = trial.folder / f"node{number}-{len(trial.jobs)}.log"
                agents.append(Agent(command, log, meet_at=endpoint))
                trial.jobs.append(agents[-1])
                trial.wait(lambda: is_open(endpoint))
            return agents

        agents = start_nodes()
        trial.wait_for_both_nodes()
        fault_s = time.time()
        agents[killed].kill()
        restart = start_nodes if killed == 0 else None
        return trial.measure_recovery(fault_s, r"docs/failures\.md", [agents[1 - killed]], restart)

    return run


def _host_disconnected(trial: FaultTrial) -> RecoveryTimes:
    if obstacle := obstacle_to_namespaces():
        raise SkippedTrialError(obstacle)
    command = small(trial.run_dir, *COMMON)
    with two_hosts() as names:
        trial.jobs += [agent_on_host(name, number, command, trial.folder) for number, name in enumerate(names, 1)]
        trial.wait_for_both_nodes()
        fault_s = time.time()
        subprocess.run(["ip", "-n", names[1], "link", "set", "cable0", "down"], check=True)
        try:
            return trial.measure_recovery(fault_s, "is unreachable", trial.jobs[:1])
        finally:
            for job in trial.jobs:
                job.kill()


def _checkpoint_damaged(damage: Callable[[Path], None]) -> TrialMain:
    """Kill a job and damage its newest checkpoint. The next start detects it."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        job = trial.start(*FOUR_RANKS)
        trial.wait_for_steps()
        job.kill()
        damage(trial.newest_checkpoint())
        started_s = time.time()
        times = trial.measure_recovery(started_s, "skipped a damaged checkpoint", [trial.start(*FOUR_RANKS)])
        times.command_s = times.recovery_s
        return times

    return run


def _flip_bytes(checkpoint: Path) -> None:
    with (checkpoint / "__2_0.distcp").open("r+b") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(size_bytes // 2)
        flipped = bytes(byte ^ 0xFF for byte in file.read(8))
        file.seek(size_bytes // 2)
        file.write(flipped)


def _remove_experts(checkpoint: Path) -> None:
    """Remove the file with the experts of one rank."""
    (checkpoint / "__1_0.distcp").unlink()


def _full_disk(trial: FaultTrial) -> RecoveryTimes:
    disk = trial.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", str(disk)]
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        raise SkippedTrialError(done.stderr.strip())
    overrides = (*FOUR_RANKS, f"checkpoint.dir={disk / 'checkpoints'}")
    filler = disk / "filler"

    def free_space() -> list[Job]:
        filler.unlink()
        return [trial.start(*overrides)]

    try:
        job = trial.start(*overrides)
        trial.wait_for_steps()
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(2**16)):
                    pass
            except OSError:
                fault_s = time.time()
        return trial.measure_recovery(fault_s, "cannot be written to", [job], free_space)
    finally:
        for job in trial.jobs:
            job.kill()
        # Killed processes may take a moment to exit.
        trial.wait(lambda: subprocess.run(["umount", str(disk)], check=False, capture_output=True).returncode == 0)


def _folder_removed_during_save(trial: FaultTrial) -> RecoveryTimes:
    folder = trial.run_dir / "checkpoints"
    moved = trial.folder / "moved"

    def move_back() -> list[Job]:
        # The run may have created a new folder.
        if folder.exists():
            folder.rename(trial.folder / "created by the run")
        moved.rename(folder)
        return [trial.start(*FOUR_RANKS)]

    job = trial.start(*FOUR_RANKS)
    trial.wait_for_steps()
    trial.wait(lambda: any(folder.glob(".step-*.partial/__*")), poll_s=0.0005)
    folder.rename(moved)
    return trial.measure_recovery(time.time(), "cannot be written to|lacks what other ranks", [job], move_back)


def _folder_removed_between_saves(trial: FaultTrial) -> RecoveryTimes:
    folder = trial.run_dir / "checkpoints"
    job = trial.start(*FOUR_RANKS)
    trial.wait_for_steps()
    newest = trial.newest_checkpoint()
    trial.wait(lambda: trial.newest_checkpoint() != newest, poll_s=0.0005)
    # The step after it is logged once the save has ended; the next save is three steps later.
    trial.wait_for_steps(int(trial.newest_checkpoint().name.removeprefix("step-")))
    folder.rename(trial.folder / "moved")
    return trial.measure_continuation(time.time(), "is gone", job)


def _data_truncated(corrupt: str) -> TrialMain:
    """Truncate a token file to half of its size while the run reads it."""

    def run(trial: FaultTrial) -> RecoveryTimes:
        shards = trial.folder / "tokens"
        shards.mkdir()
        for number in range(NUM_SHARDS):
            ids = np.random.default_rng(number).integers(0, 200, 2**14)
            np.save(shards / f"{number}.npy", ids.astype(np.uint16))
        overrides = (*FOUR_RANKS, "data.kind=tokens", f"data.path={shards}")
        job = trial.start(*overrides, f"data.corrupt={corrupt}")
        trial.wait_for_steps()
        os.truncate(shards / "1.npy", 2**14)
        fault_s = time.time()
        if corrupt == "skip":
            return trial.measure_continuation(fault_s, "left out data file", job)
        return trial.measure_recovery(
            fault_s, "broke while the run read it", [job], lambda: [trial.start(*overrides, "data.corrupt=skip")]
        )

    return run


SAME_COMMAND = "the same command"
THE_OTHERS = "the other ranks"
FAULTS: dict[str, tuple[TrialMain, str]] = {
    "rank killed, own launcher (4 ranks)": (_own_launcher(signal.SIGKILL, "was killed by SIGKILL"), SAME_COMMAND),
    "rank killed, own launcher (8 ranks)": (_eight_ranks(), SAME_COMMAND),
    "rank killed, regroup from a checkpoint (8 ranks)": (_eight_ranks(REGROUP), THE_OTHERS),
    "rank killed, regroup from memory (8 ranks)": (_eight_ranks(REGROUP, "checkpoint.peer_every=1"), THE_OTHERS),
    "rank 1 killed, regroup under srun (2 ranks)": (_srun_regroups, THE_OTHERS),
    "rank killed, torchrun on one node (2 ranks)": (_torchrun(signal.SIGKILL, "is gone"), "torchrun"),
    "rank 1 killed, srun (2 ranks)": (_srun(1, "is gone"), SAME_COMMAND),
    "rank 0, which runs the store, killed, srun (2 ranks)": (_srun(0, "the store at .* does not answer"), SAME_COMMAND),
    "rank stopped by SIGSTOP, own launcher (4 ranks)": (_own_launcher(signal.SIGSTOP, "is stopped"), SAME_COMMAND),
    "rank stopped by SIGSTOP, torchrun on one node (2 ranks)": (_torchrun(signal.SIGSTOP, "is stopped"), "torchrun"),
    "rank late: its main thread sleeps, own launcher (4 ranks)": (
        _own_launcher(signal.SIGUSR1, "is late"),
        SAME_COMMAND,
    ),
    "rank hangs inside the kernel, own launcher (4 ranks)": (
        _own_launcher(signal.SIGUSR2, "hangs inside the kernel"),
        SAME_COMMAND,
    ),
    "rank that never starts, srun (1 of 2)": (_missing_rank, SAME_COMMAND),
    "node killed, torchrun, continues with the other": (_node_killed(1), "torchrun"),
    "node killed that hosts torchrun's rendezvous": (_node_killed(0), "the same commands"),
    "host cut off (link down), torchrun, continues with the other": (_host_disconnected, "torchrun"),
    "SIGTERM, own launcher (4 ranks)": (_preempted, SAME_COMMAND),
    "bytes flipped in the newest checkpoint (from the next start)": (_checkpoint_damaged(_flip_bytes), SAME_COMMAND),
    "a file with experts removed (from the next start)": (_checkpoint_damaged(_remove_experts), SAME_COMMAND),
    "disk of the checkpoints full (tmpfs)": (_full_disk, f"free space, {SAME_COMMAND}"),
    "folder of checkpoints disappears during a save": (_folder_removed_during_save, f"the folder back, {SAME_COMMAND}"),
    "folder of checkpoints disappears between saves": (_folder_removed_between_saves, "the run continues"),
    'token file truncated during the run, data.corrupt="fatal"': (
        _data_truncated("fatal"),
        "the command with data.corrupt=skip",
    ),
    'token file truncated during the run, data.corrupt="skip"': (_data_truncated("skip"), "the run continues"),
}


def _run_trial(main: TrialMain) -> RecoveryTimes | str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trial = FaultTrial(Path(folder))
        try:
            return main(trial)
        except SkippedTrialError as reason:
            return f"skipped: {reason}"
        except (TimeoutError, subprocess.CalledProcessError) as error:
            return f"FAILED: {str(error)[-2000:]}"
        finally:
            for job in trial.jobs:
                job.kill()


def _seconds(values: Sequence[float | None]) -> str:
    times = sorted(value for value in values if value is not None)
    return "-" if not times else f"{times[0]:.1f} s" if len(times) == 1 else f"{times[0]:.1f} to {times[-1]:.1f} s"


def main() -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="run only faults whose name matches")
    parser.add_argument("--repeats", type=int, default=1, help="trials of each fault (default 1)")
    args = parser.parse_args()
    print(f"faults.timeout_s={TIMEOUT_S}; torchrun with --rdzv-conf {QUICK} where nodes may leave")
    print(
        "| fault | message after | training again after | of it the command | by |\n" + "| --- " * 5 + "|", flush=True
    )
    for name, (trial_main, restarted_by) in FAULTS.items():
        if not re.search(args.only, name):
            continue
        results = [_run_trial(trial_main) for _ in range(args.repeats)]
        times = [result for result in results if isinstance(result, RecoveryTimes)]
        columns = (
            [time.message_s for time in times],
            [time.recovery_s for time in times],
            [time.command_s for time in times],
        )
        print(f"| {name} | {' | '.join(map(_seconds, columns))} | {restarted_by} |", flush=True)
        for failure in (result for result in results if isinstance(result, str)):
            print(failure, file=sys.stderr, flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
