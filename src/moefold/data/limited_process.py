"""Subprocess with limited memory for untrusted chat templates and tokenizers.

Exceeding a limit ends only the subprocess. The subprocess also ends with its client object.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

_LAUNCHER = Path(__file__).with_name("limited_worker.py")


class ProcessEndedError(Exception):
    """A process has exceeded a limit, which the message names."""


class LimitedProcess:
    """A subprocess that answers requests over pipes. A process that was forked from its owner cannot use it."""

    def __init__(self, program: Path, *, memory_bytes: int, hard_bytes: int = 0) -> None:
        """Start a Python program that imports nothing from the package.

        Args:
            memory_bytes: limit of its memory, which it may change up to `hard_bytes`.
            hard_bytes: maximum of the limit. 0: none.
        """
        # -P: the script's folder is not on sys.path, because its modules would shadow others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_LAUNCHER), str(program), str(memory_bytes), str(hard_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._owner = os.getpid()
        self._is_busy = False
        weakref.finalize(self, _end_process, self._process, self._owner)

    @property
    def is_usable(self) -> bool:
        """Return whether the process is alive, was started by this process, and has no pending answer."""
        return self._owner == os.getpid() and not self._is_busy and self._process.poll() is None

    def ask(
        self, request: dict[str, Any], payload: bytes = b"", *, memory_bytes: int, cpu_s: float, limit: int, does: str
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer and its data. A refused request has the reason as `refused`.

        Args:
            request: the name of the program's method as `do`, and its arguments.
            limit: maximum bytes of the answer, without its data.
            does: work of the process, for the message.

        Raises:
            ProcessEndedError: the process has exceeded a limit.
        """
        header = json.dumps(request | {"bytes": len(payload), "memory_bytes": memory_bytes, "cpu_s": cpu_s})
        self._is_busy = True
        self._send(header.encode() + b"\n" + payload)
        line = self._read_line(limit)
        answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass")) if line.endswith(b"\n") else {}
        data = self._stdout.read(answer["bytes"]) if answer else b""
        if answer and len(data) == answer["bytes"]:
            self._is_busy = False
            return answer, data
        self._process.kill()
        if self._process.wait() == -signal.SIGPROF:
            raise ProcessEndedError(f"it takes more than {cpu_s:.3g} s of CPU time")
        raise ProcessEndedError(f"the process that {does} it has ended; it may use {memory_bytes:,} bytes of memory")

    def _send(self, data: bytes) -> None:
        # If the process has ended, the answer is missing.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(data)
            self._stdin.flush()

    def _read_line(self, limit: int) -> bytes:
        return self._stdout.readline(limit)


def _end_process(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if os.getpid() == owner:
        process.wait()
