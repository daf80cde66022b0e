"""Processes of a data job do every task once; a killed one is an error and no hang."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from moefold.data.worker_pool import run_tasks
from moefold.errors import ConfigError


def square(task: int, report: Callable[[int], None]) -> tuple[int, int]:
    report(task)
    return task * task, os.getpid()


def refuse(task: int, report: Callable[[int], None]) -> int:
    if task == 2:
        raise ConfigError("two is not wanted")
    return task


def fail(task: int, report: Callable[[int], None]) -> float:
    return 1 / task


def die(task: int, report: Callable[[int], None]) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return task


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_every_task_once_over_the_processes(processes: int):
    told = []
    results = dict(run_tasks(square, [3, 1, 4], processes, told.append))
    assert {number: value for number, (value, _) in results.items()} == {0: 9, 1: 1, 2: 16}
    assert sorted(told) == [1, 3, 4]
    pids = {pid for _, pid in results.values()}
    assert (os.getpid() in pids) == (processes == 1)
    assert len(pids) <= processes


@pytest.mark.parametrize("processes", [1, 2])
def test_a_refusal_is_the_users_error_and_a_fault_is_ours(processes: int):
    with pytest.raises(ConfigError, match="two is not wanted"):
        list(run_tasks(refuse, [1, 2, 3], processes, print))
    with pytest.raises((RuntimeError, ZeroDivisionError), match="division by zero"):
        list(run_tasks(fail, [1, 0], processes, print))


def test_a_killed_process_is_not_a_hang():
    with pytest.raises(ConfigError, match=r"was killed \(exit code -9\)"):
        list(run_tasks(die, [0, 1, 2, 3], 2, print))
