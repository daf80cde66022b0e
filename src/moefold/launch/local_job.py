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
from moefold.launch.child import end_with_parent, signals_held_back
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.relay import RELAYED
from moefold.printable import escape_log_lines

RankMain = Callable[[Place, str], int]
"""What a rank runs: given its place and its device type, returns the exit status of the job."""

GRACE_S = 30.0
"""So long ranks have to end after one has failed, until they are killed."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: int
    """The largest that a rank returned; 0 if one failed."""
    failed_rank: int | None
    """The first rank that did not return."""
    exitcode: int
    """Of its process; negative: the signal that ended it."""


def run_processes(main: RankMain, places: Sequence[Place], device_type: str) -> Ended:
    """Run `main` in one process for each place; returns when all have ended.

    CPU ranks are forked from this process, which has torch in memory already; GPU ranks must be spawned. A rank that
    fails ends the others. If this process is killed, the ranks get a SIGINT.

    Raises:
        RunError: the system starts no more processes.
    """
    context: ForkContext | SpawnContext
    context = get_context("fork") if device_type == "cpu" else get_context("spawn")
    all_started = context.Barrier(len(places))
    ranks: list[_Rank] = []
    try:
        for place in places:
            ours, theirs = context.Pipe(duplex=False)
            entry = (main, place, device_type, os.getpid(), all_started, theirs)
            process = context.Process(target=_rank_entry, args=entry, name=f"rank {place.rank}")
            try:
                with signals_held_back(RELAYED, starts_python=device_type != "cpu"):
                    process.start()
            except OSError as error:
                raise RunError(
                    f"this machine starts no more than {len(ranks)} of {len(places)} ranks: {error.strerror or error}; "
                    "set fewer ranks, or raise its limit of processes (ulimit -u)"
                ) from None
            theirs.close()
            ranks.append(_Rank(process, ours))
        return _wait_for(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.answer.close()


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    answer: Connection


def _wait_for(ranks: Sequence[_Rank]) -> Ended:
    statuses: list[int] = []
    running = dict(enumerate(ranks))
    while running:
        ended = set(wait([rank.process.sentinel for rank in running.values()]))
        for number in [number for number, rank in running.items() if rank.process.sentinel in ended]:
            process, answer = running[number].process, running[number].answer
            del running[number]
            process.join()
            if process.exitcode or not answer.poll():
                _end([rank.process for rank in running.values()])
                return Ended(0, number, process.exitcode or 0)
            statuses.append(int(answer.recv_bytes()))
    return Ended(max(statuses), None, 0)


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _rank_entry(
    main: RankMain, place: Place, device_type: str, launcher: int, all_started: Barrier, answer: Connection
) -> None:
    os.environ.update(_variables(place))
    with FailingRank(place, lambda: False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)
        end_with_parent(signal.SIGINT, launcher)
        # The launcher's store looks up the name of each rank that connects, in a thread. A rank forked meanwhile would
        # inherit the lock of the C library's resolver without the thread that opens it, and hang in its own look-up.
        all_started.wait()
        escape_log_lines()
        status = main(place, device_type)
    if os.getppid() != launcher:
        # The rank ended as on Ctrl-C. There is nothing to tell the status to.
        os._exit(status)
    answer.send_bytes(str(status).encode())


def _variables(place: Place) -> dict[str, str]:
    """What libraries look for in the environment of a rank: torch's device meshes, progress bars."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.master_port),
    }
