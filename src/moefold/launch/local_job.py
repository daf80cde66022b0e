"""Processes of this machine, one for each rank: start them, wait for them, end them together."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier

from moefold.errors import RunError
from moefold.launch.child import block_signals, signal_on_parent_death
from moefold.launch.failure import RankErrorHandler
from moefold.launch.place import RankEnv
from moefold.launch.relay import FORWARDED_SIGNALS
from moefold.printable import escape_log_lines

RankMain = Callable[[RankEnv, str], int]
"""What a rank runs: given its place and its device type, returns the exit status of the job."""

EXIT_GRACE_S = 30.0
"""So long ranks have to end after one has failed, until they are killed."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    status: int
    """The largest that a rank returned; 0 if one failed."""
    failed_rank: int | None
    """The first rank that did not return."""
    exitcode: int
    """Of its process; negative: the signal that ended it."""


def run_processes(main: RankMain, rank_envs: Sequence[RankEnv], device_type: str) -> JobResult:
    """Run `main` in one process for each place; returns when all have ended.

    CPU ranks are forked from this process, which has torch in memory already; GPU ranks must be spawned. A rank that
    fails ends the others. If this process is killed, the ranks get a SIGINT.

    Raises:
        RunError: the system starts no more processes.
    """
    context: ForkContext | SpawnContext
    context = get_context("fork") if device_type == "cpu" else get_context("spawn")
    all_started = context.Barrier(len(rank_envs))
    ranks: list[_RankProcess] = []
    try:
        for place in rank_envs:
            ours, theirs = context.Pipe(duplex=False)
            entry = (main, place, device_type, os.getpid(), all_started, theirs)
            process = context.Process(target=_rank_entry, args=entry, name=f"rank {place.rank}")
            try:
                with block_signals(FORWARDED_SIGNALS, starts_python=device_type != "cpu"):
                    process.start()
            except OSError as error:
                raise RunError(
                    f"this machine starts no more than {len(ranks)} of {len(rank_envs)} ranks: {error.strerror or error}; "
                    "set fewer ranks, or raise its limit of processes (ulimit -u)"
                ) from None
            theirs.close()
            ranks.append(_RankProcess(process, ours))
        return _wait_for_ranks(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.status_pipe.close()


@dataclass(frozen=True)
class _RankProcess:
    process: BaseProcess
    status_pipe: Connection


def _wait_for_ranks(ranks: Sequence[_RankProcess]) -> JobResult:
    statuses: list[int] = []
    running = dict(enumerate(ranks))
    while running:
        ended = set(wait([rank.process.sentinel for rank in running.values()]))
        for number in [number for number, rank in running.items() if rank.process.sentinel in ended]:
            process, answer = running[number].process, running[number].status_pipe
            del running[number]
            process.join()
            if process.exitcode or not answer.poll():
                _terminate([rank.process for rank in running.values()])
                return JobResult(0, number, process.exitcode or 0)
            statuses.append(int(answer.recv_bytes()))
    return JobResult(max(statuses), None, 0)


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + EXIT_GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _rank_entry(
    main: RankMain,
    rank_env: RankEnv,
    device_type: str,
    launcher_pid: int,
    all_started: Barrier,
    status_pipe: Connection,
) -> None:
    os.environ.update(_torchrun_variables(rank_env))
    with RankErrorHandler(rank_env, lambda: False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        signal_on_parent_death(signal.SIGINT, launcher_pid)
        # The launcher's store looks up the name of each rank that connects, in a thread. A rank forked meanwhile would
        # inherit the lock of the C library's resolver without the thread that opens it, and hang in its own look-up.
        all_started.wait()
        escape_log_lines()
        status = main(rank_env, device_type)
    if os.getppid() != launcher_pid:
        # The rank ended as on Ctrl-C. There is nothing to tell the status to.
        os._exit(status)
    status_pipe.send_bytes(str(status).encode())


def _torchrun_variables(rank_env: RankEnv) -> dict[str, str]:
    """What libraries look for in the environment of a rank: torch's device meshes, progress bars."""
    return {
        "RANK": str(rank_env.rank),
        "LOCAL_RANK": str(rank_env.local_rank),
        "WORLD_SIZE": str(rank_env.world_size),
        "LOCAL_WORLD_SIZE": str(rank_env.local_world_size),
        "MASTER_ADDR": rank_env.master_address,
        "MASTER_PORT": str(rank_env.master_port),
    }
