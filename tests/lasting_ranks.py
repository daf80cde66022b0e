"""Ranks that serve many tests: the start of ranks and the first step cost more than further calls.

The fixture `pool` has such ranks. Tests of a rank's state at its start, or of its end, ask for `fresh_pool`. A call
that leaves a function of moefold replaced, or a hook of all modules, fails.
"""

import faulthandler
import gc
import os
import pickle
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moefold.launch.rank_pool import WorkerPool, collect_results, worker_main
from moefold.progress import ignore_progress
from moefold.verify import PRELOAD

MOST_RANKS = 4
"""Tasks of more ranks take long: each has its own."""
MOST_CALLS = 64
"""Calls of the same ranks: each call leaves a process group with two threads."""
HOOKS = {
    name: value
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, value in vars(sys.modules[module]).items()
    if name.startswith("_global_") and isinstance(value, dict)
}
"""Hooks of all modules and of all optimizers."""
TIMEOUT_S = 280.0
"""Timeout of the process groups; less than pytest's limit for a test."""


@dataclass
class Ranks:
    """Running ranks of one process group."""

    processes: list[BaseProcess]
    lives: list[Connection]
    """A rank ends when its caller closes this one."""
    calls: list[Connection]
    num_calls: int = 0

    def end(self) -> None:
        """End the ranks."""
        for connection in (*self.lives, *self.calls):
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class LastingRanks(WorkerPool):
    """Pool whose calls of equally many ranks are made by the same ranks, until one fails or `MOST_CALLS` were made.

    A called function leaves nothing behind that the next call would see; random numbers, the environment and torch's
    settings are as at the start of the rank.
    """

    def __init__(self) -> None:
        super().__init__(preload=[*PRELOAD, "tests.preload"])
        self._ranks: dict[int, Ranks] = {}
        # Sites call from threads, and `_fork` reads the attribute that `_start` sets.
        self._starting = threading.Lock()

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> list[Any]:
        """As of any pool."""
        if on_progress is not None or world_size > MOST_RANKS:
            return super().run(world_size, function, *args, timeout_s=timeout_s, on_progress=on_progress)
        ranks = self._ranks.pop(world_size, None) or self._start(world_size)
        ranks.num_calls += 1
        is_done = False
        try:
            for connection in ranks.calls:
                connection.send((function, args, timeout_s))
            results = collect_results(ranks.calls, timeout_s, ignore_progress)
            is_done = True
        finally:
            if is_done and ranks.num_calls < MOST_CALLS:
                self._ranks[world_size] = ranks
            else:
                ranks.end()
        return results

    def end(self) -> None:
        """End all ranks."""
        while self._ranks:
            self._ranks.popitem()[1].end()

    def _start(self, world_size: int) -> Ranks:
        ranks = Ranks([], [], [])
        with self._starting:
            task = next(self._task_ids)
            for rank in range(world_size):
                ours, calls = self._context.Pipe()
                self._main = partial(_lasting_main, calls)
                process, life = self._fork(task, rank, world_size, TIMEOUT_S)
                calls.close()
                ranks.processes.append(process)
                ranks.lives.append(life)
                ranks.calls.append(ours)
            self._main = worker_main
        return ranks


class _FirstCall:
    """End of a pipe whose first message is a call of `_serve`; the failure that ends it goes where results go."""

    def __init__(self, connection: Connection, calls: Connection) -> None:
        self._connection = connection
        self._calls = calls
        self.recv_bytes = connection.recv_bytes
        self.send_bytes = calls.send_bytes

    def recv(self) -> tuple[Callable[..., None], tuple[Connection], bool]:
        return _serve, (self._calls,), False


def _lasting_main(calls: Connection, connection: Connection, *args: Any) -> None:
    worker_main(_FirstCall(connection, calls), *args)  # type: ignore[arg-type]


def _serve(calls: Connection) -> None:
    """Make calls until one fails or the caller is gone."""
    environment = dict(os.environ)
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    process = _process_state()
    # What one rank replaces, all do: each look takes 3 ms.
    code = _code() if dist.get_rank() == 0 else []
    while True:
        function, args, timeout_s = calls.recv()
        faulthandler.dump_traceback_later(max(1.0, timeout_s - 1.0), file=sys.stderr)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(numbers[0])
        random.setstate(numbers[1])
        np.random.set_state(numbers[2])
        torch.use_deterministic_algorithms(settings[0])
        torch.set_num_threads(settings[1])
        torch.set_default_dtype(settings[2])
        result = function(*args)
        changed = [name for name, value in _process_state().items() if value != process[name]]
        if left := ", ".join([*_left_behind(code), *changed]):
            raise AssertionError(f"{function} left {left} behind: its test has to ask for fresh_pool")
        dist.barrier()
        calls.send_bytes(pickle.dumps((True, result)))


def _code() -> list[tuple[dict[str, Any], str, object]]:
    """Return the functions and classes of all modules of moefold, and members of those classes, with their places."""
    found = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("moefold."):
            continue
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module_name:
                found += [(value, key, each) for key, each in vars(value).items() if callable(each)]
            if callable(value):
                found.append((module, name, value))
    return [(vars(owner), name, value) for owner, name, value in found]


def _process_state() -> dict[str, object]:
    """Return the settings of this process that a test may change."""
    return {
        "another folder": os.getcwd(),
        "a limit of file sizes": resource.getrlimit(resource.RLIMIT_FSIZE),
        "a handler of SIGXFSZ": signal.getsignal(signal.SIGXFSZ),
    }


def _left_behind(code: list[tuple[Any, str, object]]) -> list[str]:
    """Return the functions that a call has replaced and the hooks it has left, in words."""
    replaced = [
        getattr(value, "__qualname__", name)
        for names, name, value in code
        # The first optimizer of a class has torch wrap its step, for good.
        if names.get(name) is not value and not hasattr(names.get(name), "hooked")
    ]
    hooks = [name for name, hooks in HOOKS.items() if hooks]
    collector = [] if gc.isenabled() and not gc.get_debug() else ["another garbage collection"]
    return [*replaced, *hooks, *collector]
