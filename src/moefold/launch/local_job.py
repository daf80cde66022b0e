"""Processes of this machine, one for each rank: start them, wait for them, end them together.

Temporary folders of processes that were killed: marked when they are made, removed by the next start. Torch-free.

Files in which the ranks of our own launcher keep their records, and the message that ends the job. Torch-free.
"""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory

from moefold.errors import RunError
from moefold.host.processes import block_signals, signal_on_parent_death
from moefold.host.rank_env import RankEnv
from moefold.launch.failure import RankErrorHandler
from moefold.launch.signal_forwarder import FORWARDED_SIGNALS
from moefold.terminal import escape_log_lines

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
            process = running[number].process
            answer = running[number].status_pipe
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


LOCK_FILE = "moefold.lock"
"""The file in a folder whose lock its owner holds until it ends, however it ends."""


def claim_folder(folder: Path) -> None:
    """Mark a temporary folder as one of this process, for as long as it lives."""
    lock = folder / LOCK_FILE
    if lock.exists():
        return
    # The name appears when the lock is held: a process that looks for folders without an owner finds none unlocked.
    draft = folder / f"{LOCK_FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    draft.rename(lock)


def remove_stale_folders(parent: Path | None = None) -> None:
    """Remove the marked folders of this user whose owner has ended.

    Args:
        parent: they lie in it; by default the system's temporary folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in parent.iterdir():
        # Other processes come and go, and other users' folders cannot be opened.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK_FILE).is_file():
                continue
            if _is_unlocked(folder / LOCK_FILE):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def record_files(world_size: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths of one empty file for each rank, and last of one for the message.

    The files have no names on any disk where the system knows such files (Linux): they live as long as a process has
    them open, so that a launcher or rank that is killed leaves nothing behind. They are reached through the launcher's
    open descriptors. Elsewhere they lie in a temporary folder, which the next start removes if a kill left it.
    """
    count = world_size + 1
    with ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptors = [os.memfd_create("moefold-record") for _ in range(count)]
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
            yield tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors)
            return
        remove_stale_folders()
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="moefold-")))
        claim_folder(folder)
        paths = [folder / str(number) for number in range(count)]
        for path in paths:
            path.touch()
        yield tuple(map(str, paths))
