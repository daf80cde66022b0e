"""A pool of gloo ranks on this machine that import torch once: parity tests and `moefold verify` run on it.

The workers are forked from a fork server that has torch in memory, so a test pays for its process group alone. A task that
fails or outlasts its time limit ends with the tracebacks of the ranks; the workers are then replaced.
"""

import faulthandler
import itertools
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 2.0
"""After one rank failed, the others get this long to report before they are ended."""


class WorkerError(RuntimeError):
    """A rank raised, died or did not answer in time; the message names each such rank."""


class WorkerPool:
    """Forked ranks that run functions together, each call in a fresh process group."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["moefold.testing.preload"])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._task_ids = itertools.count()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank of a new gloo process group.

        Args:
            world_size: number of ranks.
            function: importable by name; asks torch.distributed for its rank. What it returns is pickled back.
            args: picklable arguments, the same on every rank.
            timeout_s: seconds until the ranks count as hung.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: a rank raised, died or hung.
        """
        self._grow(world_size)
        task = next(self._task_ids)
        for rank in range(world_size):
            self._workers[rank][1].send((task, self._store.port, rank, world_size, timeout_s, function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    ok, value = ready.recv()
                except EOFError:
                    ok, value = False, f"the process of rank {rank} died"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or waiting:
            self.close()
            raise WorkerError(_report(failures, sorted(waiting.values()), timeout_s))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _grow(self, world_size: int) -> None:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            while len(self._workers) < world_size:
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before


def _report(failures: dict[int, str], silent: list[int], timeout_s: float) -> str:
    lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
    if silent and failures:
        lines.append(f"ranks {silent} were still waiting and were ended")
    elif silent:
        lines.append(f"ranks {silent} did not answer within {timeout_s:g} s (their stacks are on stderr)")
    return "\n".join(lines)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task, port, rank, world_size, timeout_s, function, args = connection.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0), file=sys.__stderr__)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"task{task}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            answer = (True, function(*args))
            dist.barrier()
        except BaseException:  # the parent decides: every failure of a rank travels to it as text
            answer = (False, traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
        if not answer[0]:
            return
        dist.destroy_process_group()
