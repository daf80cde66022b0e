"""Local job: start one process per rank on this machine, wait for them, and end them together.

The launcher passes Ctrl-C, SIGTERM and SIGHUP to its ranks and waits for them. The job's temporary files are the
flight-record files of the ranks. Folders left by killed processes are removed.
"""

import gc
import multiprocessing
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
from types import FrameType
from typing import Any, Self

from moefold.errors import EXIT_FAILED, SIGNAL_STATUS, RunError
from moefold.file_lock import FileLock, open_lock_file
from moefold.host.processes import STOP_SIGNALS, block_signals, handle_stop_signals, signal_on_parent_death
from moefold.host.rank_env import RankEnv
from moefold.launch.rank_errors import RankErrorHandler
from moefold.terminal import escape_log_lines

RankMain = Callable[[RankEnv, str], int]
"""Main function of a rank: called with its environment and device type, returns the exit status of the job."""

EXIT_GRACE_S = 30.0
"""Time that the other ranks have to exit after a rank has failed, before they are killed."""


@dataclass(frozen=True)
class JobResult:
    """Exit status of a job of local ranks, and the rank that failed first."""

    status: int
    """Largest status that a rank returned, or 0 if a rank failed."""
    failed_rank: int | None
    """First rank that did not return, or the lost rank whose loss ended the job."""
    exitcode: int
    """Exit code of the failed rank's process. A negative code is the signal that ended it."""


def run_processes(
    main: RankMain, rank_envs: Sequence[RankEnv], device_type: str, on_loss: Callable[[int, int], None] | None = None
) -> JobResult:
    """Run `main` in one process for each rank environment and wait until all have ended.

    CPU ranks are forked from this process, which has imported torch already. GPU ranks must be spawned. A failed rank
    ends the others. If this process is killed, the ranks get SIGINT.

    Args:
        on_loss: called with the number and the exit code of a rank that a signal has ended, if others run: they go on.
            None if such a rank has failed.

    Raises:
        RunError: the system cannot start another process.
    """
    # A forked rank must not destroy process groups of this process: their threads do not exist there.
    gc.collect()
    context: ForkContext | SpawnContext
    context = get_context("fork") if device_type == "cpu" else get_context("spawn")
    all_started = context.Barrier(len(rank_envs))
    ranks: list[_RankProcess] = []
    try:
        for rank_env in rank_envs:
            receiver, sender = context.Pipe(duplex=False)
            entry_args = (main, rank_env, device_type, os.getpid(), all_started, sender)
            process = context.Process(target=_rank_entry, args=entry_args, name=f"rank {rank_env.rank}")
            try:
                with block_signals(STOP_SIGNALS, starts_python=device_type != "cpu"):
                    process.start()
            except OSError as error:
                raise RunError(
                    f"this machine cannot start more than {len(ranks)} of {len(rank_envs)} ranks: "
                    f"{error.strerror or error}; set fewer ranks, or raise its limit of processes (ulimit -u)"
                ) from None
            sender.close()
            ranks.append(_RankProcess(process, receiver))
        return _wait_for_ranks(ranks, on_loss)
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


def _wait_for_ranks(ranks: Sequence[_RankProcess], on_loss: Callable[[int, int], None] | None) -> JobResult:
    statuses: list[int] = []
    last_loss: JobResult | None = None
    running = dict(enumerate(ranks))
    while running:
        ended = set(wait([rank.process.sentinel for rank in running.values()]))
        for number in [number for number, rank in running.items() if rank.process.sentinel in ended]:
            process = running[number].process
            status_pipe = running[number].status_pipe
            del running[number]
            process.join()
            exitcode = process.exitcode or 0
            if on_loss is not None and exitcode < 0 and (running or statuses):
                last_loss = JobResult(0, number, exitcode)
                on_loss(number, exitcode)
                continue
            if exitcode or not status_pipe.poll():
                _terminate([rank.process for rank in running.values()])
                # A survivor that fails after a loss fails because of it.
                return last_loss if last_loss and exitcode == EXIT_FAILED else JobResult(0, number, exitcode)
            statuses.append(int(status_pipe.recv_bytes()))
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
    # Inherited objects are never collected here; see `run_processes`.
    gc.freeze()
    os.environ.update(_torchrun_variables(rank_env))
    with RankErrorHandler(rank_env, lambda: False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal_on_parent_death(signal.SIGINT, launcher_pid)
        # A thread of the launcher's store resolves the host name of each rank that connects. A rank forked during
        # such a look-up would inherit the resolver's lock without the thread that releases it, and deadlock.
        all_started.wait()
        escape_log_lines()
        status = main(rank_env, device_type)
    if os.getppid() != launcher_pid:
        # The launcher is gone, and the rank was ended by the SIGINT of its death: no process reads the status.
        os._exit(status)
    status_pipe.send_bytes(str(status).encode())


def _torchrun_variables(rank_env: RankEnv) -> dict[str, str]:
    """Return the environment variables of torchrun, which libraries read (device meshes, progress bars)."""
    return {
        "RANK": str(rank_env.rank),
        "LOCAL_RANK": str(rank_env.local_rank),
        "WORLD_SIZE": str(rank_env.world_size),
        "LOCAL_WORLD_SIZE": str(rank_env.local_world_size),
        "MASTER_ADDR": rank_env.master_address,
        "MASTER_PORT": str(rank_env.master_port),
    }


LOCK_FILE = "moefold.lock"
"""Name of the lock file in a temporary folder. The owner holds its flock until the process ends."""


def claim_folder(folder: Path) -> None:
    """Lock a temporary folder for the lifetime of this process, so that `remove_stale_folders` spares it."""
    lock = folder / LOCK_FILE
    if lock.exists():
        return
    # Rename after locking: a concurrent `remove_stale_folders` must never see this lock file unlocked.
    draft = folder / f"{LOCK_FILE}.{os.getpid()}"
    # Never closed: the lock ends with this process and the ranks forked from it, which use the folder too.
    FileLock(open_lock_file(draft)).acquire()
    draft.rename(lock)


def remove_stale_folders(parent: Path | None = None) -> None:
    """Remove this user's folders with a lock file whose owner has ended.

    Args:
        parent: folder that contains them, by default the system's temporary folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in parent.iterdir():
        # Folders may vanish concurrently, and folders of other users cannot be opened.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK_FILE).is_file():
                continue
            if _is_unlocked(folder / LOCK_FILE):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(lock: Path) -> bool:
    with FileLock(os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)) as file_lock:
        return file_lock.try_acquire()


@contextmanager
def record_files(world_size: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths of one empty flight-record file per rank, followed by the file of the job's final message.

    On Linux these are memfds, reached through the launcher's descriptors in /proc, so a killed launcher or rank leaves
    no files. Elsewhere they are files in a temporary folder, which the next start removes if it is stale.
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


class SignalForwarder:
    """Context manager that forwards stop signals to the child processes. A second Ctrl-C kills them.

    A terminal sends Ctrl-C to the ranks too, `kill` only to this process: ranks must tolerate a repeated signal.

    Attributes:
        received: received signals, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pid = os.getpid()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = handle_stop_signals(self._forward)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def explains_exit_code(self, exitcode: int) -> bool:
        """Return whether the forwarded signals explain a child's exit code (negative: ended by a signal)."""
        expected = {SIGNAL_STATUS + number for number in self.received} | {-number for number in self.received}
        if self.got_second_interrupt:
            expected.add(-signal.SIGKILL)
        return exitcode in expected

    @property
    def got_second_interrupt(self) -> bool:
        """True after a second Ctrl-C."""
        return self.received.count(signal.SIGINT) > 1

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherits this handler until it installs its own.
            os._exit(SIGNAL_STATUS + number)
        self.received.append(number)
        children = multiprocessing.active_children()
        if not children:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(SIGNAL_STATUS + number)
        for child in children:
            if self.got_second_interrupt:
                child.kill()
            elif child.pid is not None:
                os.kill(child.pid, number)
