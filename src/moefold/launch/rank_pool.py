"""Worker pool of ranks on this machine, for `moefold verify`, `moefold memory`, tests and benchmarks.

Each task gets fresh processes, forked in milliseconds from a fork server that has imported torch. Processes are not
reused, because torch caches device meshes by their ranks and would use destroyed process groups. A task that fails or
exceeds its time limit raises an error with the tracebacks of its ranks.
"""

import faulthandler
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moefold.errors import ConfigError, RunError
from moefold.host.processes import block_signals, signal_on_parent_death
from moefold.launch.local_job import claim_folder, remove_stale_folders
from moefold.launch.rendezvous import HOST, loopback_store, restrict_to_loopback
from moefold.progress import ignore_progress

MAX_TEMP_DIR_BYTES = 70
"""Limit of the temporary folder's path: a socket's path in it is 32 bytes longer, at most 103 (macOS) or 107."""
FAILURE_GRACE_S = 2.0
"""Time for the other ranks to report after one rank failed, before they are killed."""


class WorkerError(RuntimeError):
    """Error of a task whose ranks raised, died or timed out. The message names each such rank."""


_init_gloo = partial(dist.init_process_group, "gloo")


class WorkerPool:
    """Runs functions on forked ranks, each call in its own process group."""

    def __init__(
        self, preload: Sequence[str] = (), *, init_group: Callable[..., None] = _init_gloo, forks: bool = True
    ) -> None:
        """Create a pool. Ranks are started by `run`.

        Args:
            preload: modules that the fork server imports once, so that no rank has to. Missing ones are ignored.
            init_group: initialises the process group of a rank from the arguments of `init_process_group`.
            forks: False: ranks are spawned, which takes seconds. CUDA needs this: a process forked after a query for
                GPUs cannot use them.

        Raises:
            ConfigError: the path of the temporary folder is too long for the sockets of the fork server.
        """
        _check_temp_dir()
        self._init_group = init_group
        self._main: Callable[..., None] = worker_main
        self._context: ForkServerContext | SpawnContext
        if forks:
            self._context = mp.get_context("forkserver")
            self._context.set_forkserver_preload(list(preload))
        else:
            self._context = mp.get_context("spawn")
        remove_stale_folders()
        if mp.parent_process() is None:
            # The folder contains the fork server's socket. A child process shares the folder of its parent.
            claim_folder(Path(get_temp_dir()))
        self._store = loopback_store()
        self._task_ids = itertools.count()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> list[Any]:
        """Call `function(*args)` on every rank of a new process group, and return the results in rank order.

        Args:
            function: function importable by name, with a picklable result. It asks torch.distributed for its rank.
            args: picklable arguments, equal on every rank.
            timeout_s: seconds until the ranks count as hung.
            on_progress: called with progress messages of rank 0, which `function` sends through its last argument.

        Raises:
            WorkerError: a rank raised, died or hung.
        """
        task = next(self._task_ids)
        ranks = [self._fork(task, rank, world_size, timeout_s) for rank in range(world_size)]
        try:
            for _, connection in ranks:
                connection.send((function, args, on_progress is not None))
            return collect_results([connection for _, connection in ranks], timeout_s, on_progress or ignore_progress)
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
            for process, _ in ranks:
                process.join()

    def _fork(self, task: int, rank: int, world_size: int, timeout_s: float) -> tuple[BaseProcess, Connection]:
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(
            target=self._main,
            args=(child_end, f"task{task}", self._store.port, rank, world_size, timeout_s, self._init_group),
            daemon=True,
        )
        # The fork server ignores SIGINT only once it has imported torch, and a rank whose start is interrupted before
        # its arguments are written prints a traceback.
        with _single_omp_thread(), block_signals([signal.SIGINT], starts_python=True):
            if isinstance(self._context, ForkServerContext):
                forkserver.ensure_running()
            process.start()
        child_end.close()
        return process, parent_end


def _check_temp_dir() -> None:
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_TEMP_DIR_BYTES:
        raise ConfigError(
            f"the temporary folder {folder} has a path of {len(os.fsencode(folder))} bytes, and the ranks' sockets in "
            f"it need one of at most {MAX_TEMP_DIR_BYTES}; set TMPDIR to a shorter one, as in TMPDIR=/tmp"
        )


@contextmanager
def _single_omp_thread() -> Iterator[None]:
    """Set OMP_NUM_THREADS=1 for a fork server started inside the block: ranks that share cores must not spin."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def collect_results(connections: list[Connection], timeout_s: float, on_progress: Callable[[str], None]) -> list[Any]:
    """Return the results in rank order. After a failure the other ranks get `FAILURE_GRACE_S` to report theirs.

    Raises:
        WorkerError: a rank raised, died or hung. Its cause is the first error whose text is a message to the user.
    """
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, Exception | None]] = {}
    deadline = time.monotonic() + timeout_s
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = waiting[ready]
            try:
                is_success, value = pickle.loads(ready.recv_bytes())
            except EOFError:
                is_success = False
                value = (f"the process of rank {rank} died", None)
            if is_success is None:
                on_progress(value)
                continue
            del waiting[ready]
            if is_success:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if failures or waiting:
        texts = {rank: text for rank, (text, _) in failures.items()}
        explained = next((error for _, error in failures.values() if error is not None), None)
        raise WorkerError(_report(texts, sorted(waiting.values()), timeout_s)) from explained
    return [results[rank] for rank in range(len(connections))]


def _report(failures: dict[int, str], silent: list[int], timeout_s: float) -> str:
    lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
    if silent and failures:
        lines.append(f"ranks {silent} were still waiting and were ended")
    elif silent:
        lines.append(f"ranks {silent} did not answer within {timeout_s:g} s (their stacks are on stderr)")
    return "\n".join(lines)


def worker_main(
    connection: Connection,
    task: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    init_group: Callable[..., None],
) -> None:
    """Initialise the process group of one rank, make the call that its connection brings, and send the result."""
    # A terminal sends SIGINT to all processes; the process that the user started ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    restrict_to_loopback()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0), file=sys.stderr)

    def report_progress(text: str) -> None:
        if rank == 0:
            connection.send_bytes(pickle.dumps((None, text)))

    result: tuple[bool, Any]
    try:
        function, args, reports_progress = connection.recv()
        threading.Thread(target=_exit_with_caller, args=(connection,), daemon=True).start()
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
        init_group(store=dist.PrefixStore(task, store), rank=rank, world_size=world_size, timeout=timeout)
        result = (True, function(*args, report_progress) if reports_progress else function(*args))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - every failure of a rank is sent to the parent as text
        from moefold.config.base.part_failures import failure_of_part

        reported = failure_of_part(error) or error
        result = (False, (traceback.format_exc(), reported if type(reported) in (ConfigError, RunError) else None))
    # Plain pickle: torch's reducers would share memory with this process, which ends now.
    with suppress(BrokenPipeError):
        # The parent may have been interrupted.
        connection.send_bytes(pickle.dumps(result))


def _exit_with_caller(connection: Connection) -> None:
    """Exit when the process that called `run` is gone. Otherwise the fork server would keep running."""
    with suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)
