"""Process pool for tokenisation.

Workers end with their parent, even if it is killed.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from moefold.errors import ConfigError
from moefold.host.processes import block_signals, signal_on_parent_death
from moefold.message_text import keep_names

ByteProgressCallback = Callable[[int], None]
TaskFunction = Callable[[Any, ByteProgressCallback], Any]


def run_tasks(
    work: TaskFunction, tasks: Sequence[Any], num_processes: int, report: ByteProgressCallback
) -> Iterator[tuple[int, Any]]:
    """Run tasks in worker processes, in any order.

    Args:
        work: called with a task and a function that reports progress. Both must be picklable.
        num_processes: maximum number of processes. 1: the tasks run in this process.

    Yields:
        The number of a finished task, and the result of `work`.

    Raises:
        ConfigError: `work` raised it, or a process was killed or cannot be started.
    """
    if num_processes == 1 or len(tasks) < 2:
        for number, task in enumerate(tasks):
            yield number, work(task, report)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(min(num_processes, len(tasks))):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_worker_main, args=(child_end, keep_names(work)), daemon=True)
            try:
                with block_signals([signal.SIGINT], starts_python=True):
                    process.start()
            except OSError as error:
                raise ConfigError(
                    f"no more than {len(processes)} processes can be started ({error.strerror or error}); "
                    "give a smaller --processes"
                ) from error
            child_end.close()
            processes[parent_end] = process
        yield from _distribute(processes, tasks, report)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _distribute(
    processes: dict[Connection, Any], tasks: Sequence[Any], report: ByteProgressCallback
) -> Iterator[tuple[int, Any]]:
    waiting = list(enumerate(tasks))[::-1]
    idle = list(processes)
    busy: set[Connection] = set()
    while waiting or busy:
        while waiting and idle:
            connection = idle.pop()
            connection.send(waiting.pop())
            busy.add(connection)
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            try:
                kind, value = ready.recv()
            except (EOFError, OSError):
                process = processes[ready]
                process.join()
                raise ConfigError(
                    f"a process that tokenises was killed (exit code {process.exitcode}), perhaps because memory ran "
                    "out; run the same command again to resume, if necessary with a smaller --processes"
                ) from None
            if kind == "progress":
                report(value)
            elif kind == "refused":
                raise value
            elif kind == "failed":
                raise RuntimeError(f"a process that tokenises failed:\n{value}")
            else:
                busy.remove(ready)
                idle.append(ready)
                yield value


def _worker_main(connection: Connection, work: TaskFunction) -> None:
    """Run tasks until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    # The worker processes already use all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def report(progress: int) -> None:
        connection.send(("progress", progress))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, task = connection.recv()
            try:
                answer: tuple[str, Any] = ("done", (number, work(task, report)))
            except ConfigError as error:
                answer = ("refused", error)
            except BrokenPipeError:
                return
            except Exception:  # noqa: BLE001
                answer = ("failed", traceback.format_exc())
            connection.send(answer)
