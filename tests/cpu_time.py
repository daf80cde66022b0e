"""Pytest plugin that records the CPU seconds of each test: `pytest -p tests.cpu_time --cpu-time FILE` (Linux).

Counted are this process, the children that it waited for, and the fork server of the worker pool with its ranks, also
those that go on to serve other tests.
With several workers of pytest-xdist each writes its own file, FILE.gw0 and so on.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
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
    """Return the CPU time of the running fork server, of the ranks that it reaped, and of those that live."""
    server = forkserver._forkserver._forkserver_pid
    if server is None:
        return 0.0
    seconds: dict[int, float] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # Fields of proc(5): 4 is the parent, 14 to 17 are utime, stime, cutime and cstime; field 3 comes first.
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(folder.name)] = int(fields[1])
            seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    found = [server]
    while found:
        pid = found.pop()
        total += seconds.get(pid, 0.0)
        found += [child for child, parent in parents.items() if parent == pid]
    return total
