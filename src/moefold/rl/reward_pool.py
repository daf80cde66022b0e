"""Pool of worker processes that run a user's reward function, with a time limit for each call.

The workers are processes of the same user with the same rights: they protect a run from functions that hang or crash,
but not a machine from hostile code.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import the function."""


class RewardError(Exception):
    """Reward function that failed, hung, or did not return a list of rewards. The message has the reason."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        """Traceback in the worker, or empty if there is none."""


class RewardTimeoutError(RewardError):
    """Reward function, or its import, that exceeded its time limit."""


class _Worker:
    """One worker process. It raises RewardError if the function cannot be imported in time."""

    def __init__(self, path: Path, function: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moefold.rl.reward_worker", str(path), function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # Ctrl-C in the terminal stops the run, which then ends the workers.
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            self._receive(START_TIMEOUT_S)
        except RewardError:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def call(self, arguments: Mapping[str, Any], timeout_s: float) -> list[Any]:
        """Return the rewards. Raise RewardError if the function failed, and kill one that hangs."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RewardError(f"ended its process with status {self._process.wait()}") from None
        rewards: list[Any] = self._receive(timeout_s)["rewards"]
        return rewards

    def close(self) -> None:
        """End the process and the processes that the function has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        # The buffer may contain a request that a dead worker did not read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise RewardTimeoutError(f"took longer than {timeout_s:g} s") from None
        if not line:
            raise RewardError(f"ended its process with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RewardError(answer["error"], answer.get("traceback", ""))
        return answer

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


class RewardPool:
    """Context manager that runs a function on several workers. A worker that hangs or dies is replaced."""

    def __init__(self, path: Path, function: str, *, workers: int, timeout_s: float) -> None:
        """Describe the pool. Processes start with the first call, and `timeout_s` limits one call."""
        self._path = path
        self._function = function
        self._timeout_s = timeout_s
        self._is_closed = False
        self._workers: set[_Worker] = set()
        self._free: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(workers):
            self._free.put(None)
        self._threads = ThreadPoolExecutor(workers)

    def call_all(
        self, calls: Sequence[Mapping[str, Any]], limit_s: float | None = None
    ) -> Iterator[list[Any] | RewardError]:
        """Call the function with each of several keyword arguments, and yield results in order, or their errors.

        All calls are queued at once. Pending calls are dropped when the pool is closed.

        Raises:
            TimeoutError: a result is later than `limit_s` for all calls together. Pending calls are dropped.
        """
        return self._threads.map(self._call, calls, timeout=limit_s)

    def close(self) -> None:
        """End all workers, even during a call."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._workers):
            worker.close()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, arguments: Mapping[str, Any]) -> list[Any] | RewardError:
        worker = self._free.get()
        try:
            # If a process ended between two calls, the function did not run.
            if worker is not None and not worker.is_running:
                self._end(worker)
                worker = None
            if worker is None:
                worker = _Worker(self._path, self._function)
                self._workers.add(worker)
                if self._is_closed:
                    # The worker was starting while the others were ended.
                    raise RewardError("was not called, as the pool is closed")
            return worker.call(arguments, self._timeout_s)
        except RewardError as error:
            if worker is not None and not error.details:
                # The worker hangs or is dead. After an exception of the function it is still usable.
                self._end(worker)
                worker = None
            return error
        finally:
            self._free.put(worker)

    def _end(self, worker: _Worker) -> None:
        worker.close()
        self._workers.discard(worker)
