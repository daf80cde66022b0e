"""Gloo ranks on this machine without the price of importing torch: parity tests and `moefold verify` run on them.

Each task gets fresh processes, forked in milliseconds from a fork server that has torch in memory: torch caches device
meshes by their ranks, so a process that outlived its process groups would use dead ones. A task that fails or
outlasts its time limit ends with the tracebacks of its ranks.

A communicator by itself, for tests of what takes one.
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
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import Group
from moefold.errors import ConfigError
from moefold.host.processes import block_signals, signal_on_parent_death
from moefold.launch.local_job import claim_folder, remove_stale_folders
from moefold.launch.rendezvous import HOST, loopback_store, restrict_to_loopback
from moefold.progress import ignore_progress

MAX_TEMP_DIR_BYTES = 70
"""Bytes that the path of the temporary folder may have: that of a socket in it has 32 more, of 103 (macOS) or 107."""
FAILURE_GRACE_S = 2.0
"""After one rank failed, the others get this long to report before they are ended."""


class WorkerError(RuntimeError):
    """A rank raised, died or did not answer in time; the message names each such rank."""


class WorkerPool:
    """Runs functions on forked ranks, each call in a process group of its own."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """A pool that has forked nothing yet.

        Args:
            preload: modules that ranks find in memory beside those of a training; one that is missing is left out.

        Raises:
            ConfigError: the path of the temporary folder is too long for the sockets of the fork server.
        """
        _check_temp_dir()
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["moefold.testing.preload", *preload])
        remove_stale_folders()
        if mp.parent_process() is None:
            # The socket of the fork server lies there. A child of another process shares the folder of its parent.
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
        """Call `function(*args)` on every rank of a new gloo process group.

        Args:
            world_size: number of ranks.
            function: importable by name; asks torch.distributed for its rank. What it returns is pickled back.
            args: picklable arguments, the same on every rank.
            timeout_s: seconds until the ranks count as hung.
            on_progress: called with what rank 0 says it is at; `function` then takes one more argument, which says it.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: a rank raised, died or hung.
        """
        task = next(self._task_ids)
        ranks = [self._fork(task, rank, world_size, timeout_s) for rank in range(world_size)]
        try:
            for _, connection in ranks:
                connection.send((function, args, on_progress is not None))
            return _collect([connection for _, connection in ranks], timeout_s, on_progress or ignore_progress)
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
            for process, _ in ranks:
                process.join()

    def _fork(self, task: int, rank: int, world_size: int, timeout_s: float) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_worker_main,
            args=(theirs, f"task{task}", self._store.port, rank, world_size, timeout_s),
            daemon=True,
        )
        with _single_omp_thread():
            # The fork server ignores Ctrl-C once it has imported torch.
            with block_signals([signal.SIGINT], starts_python=True):
                forkserver.ensure_running()
            process.start()
        theirs.close()
        return process, ours


def _check_temp_dir() -> None:
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_TEMP_DIR_BYTES:
        raise ConfigError(
            f"the temporary folder {folder} has a path of {len(os.fsencode(folder))} bytes, and the ranks' sockets in "
            f"it need one of at most {MAX_TEMP_DIR_BYTES}; set TMPDIR to a shorter one, as in TMPDIR=/tmp"
        )


@contextmanager
def _single_omp_thread() -> Iterator[None]:
    """Inside, a fork server that starts inherits OMP_NUM_THREADS=1: ranks that share cores must not spin on threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _collect(connections: list[Connection], timeout_s: float, on_progress: Callable[[str], None]) -> list[Any]:
    """The answers in rank order; after one failure the other ranks get a moment to report theirs."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = waiting[ready]
            try:
                ok, value = pickle.loads(ready.recv_bytes())
            except EOFError:
                ok = False
                value = f"the process of rank {rank} died"
            if ok is None:
                on_progress(value)
                continue
            del waiting[ready]
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
    if failures or waiting:
        raise WorkerError(_report(failures, sorted(waiting.values()), timeout_s))
    return [results[rank] for rank in range(len(connections))]


def _report(failures: dict[int, str], silent: list[int], timeout_s: float) -> str:
    lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
    if silent and failures:
        lines.append(f"ranks {silent} were still waiting and were ended")
    elif silent:
        lines.append(f"ranks {silent} did not answer within {timeout_s:g} s (their stacks are on stderr)")
    return "\n".join(lines)


def _worker_main(connection: Connection, task: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
    # Ctrl-C reaches every process of a terminal: the one that the user started ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    restrict_to_loopback()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0), file=sys.stderr)

    def say(text: str) -> None:
        if rank == 0:
            connection.send_bytes(pickle.dumps((None, text)))

    answer: tuple[bool, Any]
    try:
        function, args, takes_say = connection.recv()
        threading.Thread(target=_exit_with_caller, args=(connection,), daemon=True).start()
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(task, store), rank=rank, world_size=world_size, timeout=timeout
        )
        answer = (True, function(*args, say) if takes_say else function(*args))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - the parent decides: every failure of a rank travels to it as text
        answer = (False, traceback.format_exc())
    # Plain pickle: torch's own would share memory with a process that ends here.
    with suppress(BrokenPipeError):
        # The parent may have been interrupted meanwhile.
        connection.send_bytes(pickle.dumps(answer))


def _exit_with_caller(connection: Connection) -> None:
    """End this rank when the process that called `run` is gone: the fork server lives as long as one of its ranks."""
    with suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)


def make_group(ranks: Sequence[int], rank: int, handle: Any) -> Group:
    """A group with a flight record of its own.

    Args:
        ranks: its members.
        rank: my place among them.
        handle: the process group; None for a group of one.
    """
    record = FlightRecorder()
    return Group(tuple(ranks), rank, handle, record, record.add_group("test", ranks))
