"""Tasks over processes that end with the one that started them, even if that is killed.

A line that shows how far a long read is: a bar on a terminal, a plain line every ten seconds elsewhere.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from moefold.errors import ConfigError
from moefold.host.processes import block_signals, signal_on_parent_death
from moefold.terminal import print_escaped

Report = Callable[[int], None]
TaskFunction = Callable[[Any, Report], Any]


def run_tasks(
    work: TaskFunction, tasks: Sequence[Any], num_processes: int, report: Report
) -> Iterator[tuple[int, Any]]:
    """Do the work of every task, in any order.

    Args:
        work: called with a task and with a function that takes progress; both have to be picklable.
        tasks: what to do.
        num_processes: at most so many at once; 1 works in this process.
        report: told the progress of all.

    Yields:
        The number of a finished task, and what the work returned.

    Raises:
        ConfigError: as the work does, or a process was killed or cannot be started.
    """
    if num_processes == 1 or len(tasks) < 2:
        for number, task in enumerate(tasks):
            yield number, work(task, report)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(min(num_processes, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            try:
                with block_signals([signal.SIGINT], starts_python=True):
                    process.start()
            except OSError as error:
                raise ConfigError(
                    f"no more than {len(processes)} processes can be started ({error.strerror or error}); "
                    "give a smaller --processes"
                ) from error
            theirs.close()
            processes[ours] = process
        yield from _distribute(processes, tasks, report)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _distribute(processes: dict[Connection, Any], tasks: Sequence[Any], report: Report) -> Iterator[tuple[int, Any]]:
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
                    f"a process that tokenises was ended by something else (exit code {process.exitcode}), perhaps for "
                    "want of memory; the same command goes on, with a smaller --processes if need be"
                ) from None
            if kind == "progress":
                report(value)
            elif kind == "refused":
                raise ConfigError(value)
            elif kind == "failed":
                raise RuntimeError(f"a process that tokenises failed:\n{value}")
            else:
                busy.remove(ready)
                idle.append(ready)
                yield value


def _serve(connection: Connection, work: TaskFunction) -> None:
    """Do tasks until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGKILL)
    # The processes already use all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def report(progress: int) -> None:
        connection.send(("progress", progress))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, task = connection.recv()
            try:
                answer: tuple[str, Any] = ("done", (number, work(task, report)))
            except ConfigError as error:
                answer = ("refused", str(error))
            except BrokenPipeError:
                return
            except Exception:  # noqa: BLE001
                answer = ("failed", traceback.format_exc())
            connection.send(answer)


_PATIENCE_S = 1.0
_LINE_EVERY_S = 10.0


class ReadProgress:
    """Progress of reading a number of bytes, on stderr; says nothing about work that takes under a second."""

    def __init__(self, label: str, total_bytes: int | None, *, is_shown: bool = True) -> None:
        """Name the work and its size, if that is known; nothing is printed yet."""
        self._label = label
        self._total_bytes = total_bytes
        self._is_shown = is_shown
        self._done_bytes = 0
        self._next_line_s = time.monotonic() + _PATIENCE_S
        self._bar: _Bar | None = None

    def __enter__(self) -> "ReadProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, size_bytes: int) -> None:
        """Count bytes as read."""
        self._done_bytes += size_bytes
        if self._bar is not None:
            self._bar.show(self._done_bytes)
        elif self._is_shown and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            if sys.stderr.isatty():
                self._bar = _Bar(self._label, self._total_bytes)
                self._bar.show(self._done_bytes)
            else:
                total = "" if self._total_bytes is None else f" of {self._total_bytes / 1e6:.1f}"
                print_escaped(f"{self._label}: {self._done_bytes / 1e6:.1f}{total} MB", file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, label: str, total_bytes: int | None) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        from moefold.terminal import PrintableConsole

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=PrintableConsole(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(label, total=total_bytes)
        self._progress.start()

    def show(self, done_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes)

    def close(self) -> None:
        self._progress.stop()
