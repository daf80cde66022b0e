"""Commands and programs in forks of a process that has torch in memory: importing it takes longer than they do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from moefold import verify
from moefold.cli.main import main

PRELOAD = [*verify.PRELOAD, "tests.preload"]
"""Modules that the fork server holds and that this process shares with the ranks of its pool."""


def run_forked(
    words: Sequence[str], timeout_s: float, cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in a session of its own; its output and its ranks' output are kept separate.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was ended with its ranks.
    """
    return _run(_command, words, timeout_s, cwd, environment)


def run_program(
    program: str,
    *words: str,
    timeout_s: float = 60.0,
    cwd: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end as `python -c PROGRAM WORDS` does, but with torch in memory.

    Raises:
        subprocess.TimeoutExpired: it did not end in time, and was ended.
    """
    return _run(_program, (program, *words), timeout_s, cwd or Path.cwd(), environment)


def start_program(
    program: str, words: Sequence[str], printed: Sequence[Path], cwd: Path, environment: Mapping[str, str]
) -> BaseProcess:
    """Start a program as `run_program` does, in a session of its own.

    Args:
        program: run as by `python -c`.
        words: its arguments.
        printed: files of its stdout and of its stderr.
        cwd: where it runs.
        environment: of it.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_program, args=((program, *words), printed, cwd, dict(environment)))
    process.start()
    return process


def _run(
    target: Callable[..., None],
    words: Sequence[str],
    timeout_s: float,
    cwd: Path,
    environment: Mapping[str, str],
) -> subprocess.CompletedProcess[str]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        process = context.Process(target=target, args=(words, printed, cwd, dict(environment)))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            # Its session is its own as soon as it runs; before, no other process is in it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout_s)
        output, errors = (path.read_text() for path in printed)
    return subprocess.CompletedProcess(list(words), process.exitcode, output, errors)


def interrupt_forked(
    words: Sequence[str],
    is_up: Callable[[int], bool],
    interrupt: Callable[[int], None],
    cwd: Path,
    environment: Mapping[str, str],
    program: str = "",
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Start the command line or a program, interrupt it once it is up, and wait for its end.

    Args:
        words: after `moefold`, or after the program.
        is_up: given its process id, says whether it is time.
        interrupt: given its process id, interrupts it.
        cwd: where it runs.
        environment: of it.
        program: run as by `python -c`; "": the command line.

    Returns:
        How it ended, and its session, which is the process id too.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with TemporaryDirectory() as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        run, given = (_program, (program, *words)) if program else (_command, words)
        process = context.Process(target=run, args=(given, printed, cwd, dict(environment)))
        process.start()
        deadline = time.monotonic() + 200
        try:
            while not is_up(process.pid):
                assert process.is_alive(), printed[1].read_text()
                assert time.monotonic() < deadline, printed[1].read_text()
                time.sleep(0.02)
            interrupt(process.pid)
            process.join(100)
            assert process.exitcode is not None
        finally:
            # Where the test was interrupted, all go on; where the launcher has ended, its ranks may.
            kill_all(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        output, errors = (path.read_text() if path.exists() else "" for path in printed)
    return subprocess.CompletedProcess(list(words), process.exitcode, output, errors), process.pid


def kill_all(process: int) -> None:
    """Kill a process and its descendants at once: torchrun gives each rank a session of its own."""
    for number in [process, *_descendants(process)]:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False)
    found = [int(word) for word in listed.stdout.split()]
    return [*found, *(below for child in found for below in _descendants(child))]


def _command(words: Sequence[str], printed: Sequence[Path], cwd: Path, environment: Mapping[str, str]) -> None:
    _become_a_command(printed, cwd, environment)
    sys.argv = ["moefold", *words]
    sys.exit(main(words))


def _program(words: Sequence[str], printed: Sequence[Path], cwd: Path, environment: Mapping[str, str]) -> None:
    _become_a_command(printed, cwd, environment)
    sys.argv = ["-c", *words[1:]]
    try:
        exec(words[0], {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - printed as the interpreter does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _become_a_command(printed: Sequence[Path], cwd: Path, environment: Mapping[str, str]) -> None:
    os.setsid()
    # A shell's background job ignores Ctrl-C, and so would all that it starts. A fork server that the pool of workers
    # started blocks it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((sys.stdout, sys.stderr), printed, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
        # As PYTHONUNBUFFERED has it in a process of its own: lines of several ranks are in order of time.
        stream.reconfigure(write_through=True)
