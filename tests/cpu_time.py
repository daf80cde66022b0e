"""Pytest plugin that records the CPU seconds of each test: `pytest -p tests.cpu_time --cpu-time FILE` (Linux).

Counted are this process, the children that it waited for, and the fork server of the worker pool with its ranks.
With several workers of pytest-xdist each writes its own file, FILE.gw0 and so on.
"""

import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-time", default="cpu-time.txt", help="file for CPU seconds and name of each test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _cpu_seconds()
    result: Any = yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    path = Path(f"{item.config.getoption('--cpu-time')}.{worker}".rstrip("."))
    with path.open("a") as file:
        file.write(f"{_cpu_seconds() - before:8.2f} {item.nodeid}\n")
    return result


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _fork_server_seconds()


def _fork_server_seconds() -> float:
    """Return the CPU time of the running fork server and of the ranks that it reaped."""
    pid = forkserver._forkserver._forkserver_pid
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    # Fields 14 to 17 of proc(5): utime, stime, cutime and cstime; the split leaves field 3 first.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
