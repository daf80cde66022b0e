"""Subprocess with limited memory that runs what a stranger wrote: a chat template, a tokenizer.

A limit that is exceeded ends the subprocess alone. It ends with its client object, too.
"""

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("limited_worker.py")


class LimitedProcess:
    """A subprocess that answers requests over pipes. A process that was forked from its owner cannot use it."""

    def __init__(self, program: Path, *, memory_bytes: int, hard_bytes: int = 0) -> None:
        """Start a Python program.

        Args:
            program: file next to this one, which imports nothing of the package.
            memory_bytes: limit of its memory, which it may change up to `hard_bytes`.
            hard_bytes: highest limit; 0 for none.
        """
        # -P: the script's folder is not on sys.path, since its modules would shadow others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_LAUNCHER), str(program), str(memory_bytes), str(hard_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self._is_busy = False
        weakref.finalize(self, _end_process, self._process, self._owner)

    @property
    def is_usable(self) -> bool:
        """Return whether it runs, belongs to this process and has answered: a caller may be interrupted before that."""
        return self._owner == os.getpid() and not self._is_busy and self._process.poll() is None

    def finish(self) -> None:
        """Declare the last request answered."""
        self._is_busy = False

    def send(self, data: bytes) -> None:
        """Send a request; if the process has ended, its answer is missing."""
        assert self._process.stdin is not None
        self._is_busy = True
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def read_line(self, limit: int) -> bytes | None:
        """Return the next line of the answer; None if the process has ended, or the line is too long."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline(limit)
        return line if line.endswith(b"\n") else None

    def read(self, size: int) -> bytes | None:
        """Return the next bytes of the answer; None if the process has ended."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        return data if len(data) == size else None

    def end(self) -> str:
        """End the process; return why it has ended: "time", or "memory" for all other reasons."""
        self._process.kill()
        return "time" if self._process.wait() == -signal.SIGPROF else "memory"


def _end_process(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if os.getpid() == owner:
        process.wait()
