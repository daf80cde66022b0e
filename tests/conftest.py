"""Fixtures shared by all tests."""

import atexit
import gc
import linecache
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, TypeGuard

import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.any_speed import ignore_speed
from tests.no_plots import leave_out_plots

if TYPE_CHECKING:
    from tests.lasting_ranks import LastingRanks

LASTING_RANKS = pytest.StashKey["LastingRanks"]()
FROZEN_MODULES = pytest.StashKey[int]()
MAX_ROW_NAME = 60
"""Characters of one parameter in the name of a test."""
MANY_MODULES = 50
"""So many new modules are worth a garbage collection, after which they are frozen."""

ignore_speed()

# Processes that tests start inherit ignored signals, as under nohup; they must get them as from a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tables and help take their width from it; tests of a width set it themselves.
os.environ.pop("COLUMNS", None)
if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which has to be asked for before the first test imports one.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure() -> None:
    """Collect no garbage while the tests are imported: their objects stay, and would be searched again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again: `train/test_garbage_collection.py` counts on it.

    The tests and modules themselves, a million objects, are frozen: each run that a test trains in this process would
    search them several times, which takes longer than its steps.
    """
    gc.freeze()
    session.config.stash[FROZEN_MODULES] = len(sys.modules)
    # Frozen objects are not destroyed at exit, about which triton's library complains.
    atexit.register(gc.unfreeze)
    gc.enable()
    # pytest adds its handlers to each logger without propagation, 44 of torch, three times a test.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Start each worker of pytest-xdist in another part of a folder's files, as each file is compiled by the first one.

    In a fresh clone all workers would else compile every file. `pytest_collection_modifyitems` sorts the tests.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and report.passed and isinstance(collector, pytest.Directory):
        start = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[start:] + report.result[:start]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files go to one core each, the long ones go first: those that run commands, then those with many ranks.

    Files of `launch/`, whose jobs wait for a limit, lie among these: ranks of another file have the core meanwhile.

    Raises:
        pytest.UsageError: the name of a test has an address: pytest-xdist finds other tests in each process.
    """
    if unstable := next((item.nodeid for item in items if " at 0x" in item.nodeid), ""):
        raise pytest.UsageError(f"{unstable} has another name in each process; give its parameters `ids`")
    if not hasattr(config, "workerinput"):
        return
    commands = Counter(item.path for item in items if item.get_closest_marker("e2e"))
    ranks = Counter(item.path for item in items if item.get_closest_marker("parity"))
    files = sorted({item.path: None for item in items}, key=lambda path: (path not in commands, -ranks[path], path))
    waiting = [path for path in files if path.parent.name == "launch"]
    computing = [path for path in files if path not in waiting]
    between = sum(path in commands or path in ranks for path in computing) / (len(waiting) + 1)
    place = dict(zip(computing, range(len(computing)), strict=True))
    place |= {path: between * number - 0.5 for number, path in enumerate(waiting, 1)}
    items.sort(key=lambda item: (place[item.path], item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Send one report for each passed test of a worker: three, and two notes of start and end, take a millisecond."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a row by its dicts, sequences, dtypes and lambdas, as `tp2-ep2` where pytest would say `mapping0`."""
    if not isinstance(val, dict | list | tuple | torch.dtype) and not _is_lambda(val):
        return None
    return _row_name(val).encode("unicode_escape").decode("ascii")[:MAX_ROW_NAME] or None


def _row_name(value: object) -> str:
    """Return the words of a value in the name of a row; empty if a part of it has none."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict | list | tuple) and not value:
        return "none"
    if _is_lambda(value):
        return _expression(value)
    if isinstance(value, dict):
        words = [f"{key}{_row_name(part)}" for key, part in value.items() if _row_name(part)]
    elif isinstance(value, list | tuple):
        words = [_row_name(part) for part in value]
    else:
        return str(value) if isinstance(value, str | int | float | None) else getattr(value, "__name__", "")
    return "-".join(words) if all(words) and len(words) == len(value) else ""


def _is_lambda(value: object) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and value.__name__ == "<lambda>"


def _expression(function: FunctionType) -> str:
    """Return the expression of a lambda as its file has it; empty if it has several lines."""
    places = [place for place in function.__code__.co_positions() if None not in place and place[2] != place[3]]
    first, last = min(line for line, *_ in places), max(line for _, line, *_ in places)
    line = linecache.getline(function.__code__.co_filename, first)
    return line[min(place[2] for place in places) : max(place[3] for place in places)] if first == last else ""


@pytest.fixture(scope="session")
def fresh_pool() -> object:
    """Forks gloo ranks from a process that imported torch once; each call has new ranks."""
    from moefold.launch.rank_pool import WorkerPool
    from moefold.verify import PRELOAD

    return WorkerPool([*PRELOAD, "tests.preload"])


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator["LastingRanks"]:
    """Ranks that serve the calls of many tests, one after another."""
    from tests.lasting_ranks import LastingRanks

    if LASTING_RANKS not in pytestconfig.stash:
        pytestconfig.stash[LASTING_RANKS] = LastingRanks()
    yield pytestconfig.stash[LASTING_RANKS]
    pytestconfig.stash[LASTING_RANKS].end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the lasting ranks where the next file begins without them: an idle rank wakes up 100 times a second.

    Modules that a test has imported are frozen too, like the collected ones (`pytest_collection_finish`).
    """
    if len(sys.modules) - item.config.stash.get(FROZEN_MODULES, 0) >= MANY_MODULES:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN_MODULES] = len(sys.modules)
    ranks = item.config.stash.get(LASTING_RANKS, None)
    is_last = nextitem is not None and nextitem.path != item.path
    if ranks is not None and is_last and "pool" not in nextitem.fixturenames:
        ranks.end()


@pytest.fixture
def forks_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the child of `moefold memory --dry` from the fork server, not from this process.

    This process has threads (of xdist, of libraries), and a lock that one of them holds stays held in a fork.
    """
    from multiprocessing import get_context

    from moefold.train import memory_profile
    from tests.e2e.forked import PRELOAD

    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    monkeypatch.setattr(memory_profile, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Without a device `manual_seed` notes the stack of each call for the day when there is one: a millisecond.
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_plots() -> None:
    """No run in this process, or in one forked from it, draws its loss."""
    leave_out_plots()
