"""Ranks that run the recipes of many tests: the start of ranks and the first step cost more than further recipes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from moefold.launch.rank_pool import WorkerError, WorkerPool
from tests.verify.cases import Case

MOST_RANKS = 4
"""Tasks of more ranks take long: each has its own."""
MOST_CALLS = 8
"""Results of the ranks of one task."""
SECONDS_PER_CALL = 25.0
"""Until the ranks count as hung; less than pytest's limit for a test, with `MOST_CALLS`."""


@dataclass(frozen=True)
class Call:
    """The question of one test to its ranks."""

    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


class SharedRanks:
    """Makes the calls of several tests, up to eight of equally many ranks by the same ranks, when a test asks.

    Where ranks fail, each test of that task makes its call by itself, so that the right one fails, with its own error.
    If none does, the calls fail only one after another: the last test of the task raises the error of the shared ranks.
    """

    def __init__(self, pool: WorkerPool, calls: Mapping[str, Call]) -> None:
        """Create it.

        Args:
            pool: starts the ranks.
            calls: by the name of the test.
        """
        self._pool = pool
        self.calls = calls
        self._found: dict[str, list[Any]] = {}
        self._alone: set[str] = set()
        self._failed_tasks: dict[str, tuple[list[str], WorkerError]] = {}

    def results(self, name: str) -> list[Any]:
        """Return the answer of each rank for a test."""
        if name not in self._found and name not in self._alone:
            self._make_calls_like(name)
        if name not in self._found:
            return self._make_call(name)
        return self._found.pop(name)

    def _make_call(self, name: str) -> list[Any]:
        call = self.calls[name]
        names, shared_error = self._failed_tasks.get(name, ([], None))
        try:
            found = self._pool.run(call.world_size, call.function, *call.args)
        except WorkerError:
            names.clear()
            raise
        if name in names:
            names.remove(name)
            if not names:
                raise AssertionError("no call fails on ranks of its own, but one fails after others") from shared_error
        return found

    def _make_calls_like(self, name: str) -> None:
        size = self.calls[name].world_size
        alike = [other for other, call in self.calls.items() if call.world_size == size and self._is_open(other)]
        first = alike.index(name)
        names = alike[first : first + MOST_CALLS]
        if len(names) == 1 or size > MOST_RANKS:
            self._alone.add(name)
            return
        calls = [(self.calls[each].function, self.calls[each].args) for each in names]
        try:
            ranks = self._pool.run(size, _call_all, calls, timeout_s=SECONDS_PER_CALL * len(calls))
        except WorkerError as error:
            # Calls are not at fault if a busy machine takes too long.
            if not any(words in str(error) for words in ("did not answer within", "imed out")):
                self._failed_tasks |= dict.fromkeys(names, (list(names), error))
            self._alone |= set(names)
            return
        self._found |= {each: list(found) for each, found in zip(names, zip(*ranks, strict=True), strict=True)}

    def _is_open(self, name: str) -> bool:
        return name not in self._found and name not in self._alone


def selected_cases(request: pytest.FixtureRequest, test: str) -> dict[str, Case]:
    """Return the cases of a parametrized test of this file that this run has selected, by the names of their tests."""
    return selected_params(request, test, "case")


def selected_params(request: pytest.FixtureRequest, test: str, param: str) -> dict[str, Any]:
    """Return a parameter of a parametrized test of this file in each row that this run has selected, by its name."""
    items = [item for item in request.session.items if item.path == request.path and item.originalname == test]
    return {item.name: item.callspec.params[param] for item in items}


def run_each(
    pool: WorkerPool, world_size: int, function: Callable[..., Any], *each: tuple[Any, ...]
) -> list[list[Any]]:
    """Call a function once with each of some arguments, one after another by the same ranks.

    The function leaves nothing behind that the next call would see.

    Returns:
        For each of the arguments, the result of each rank.
    """
    ranks = pool.run(world_size, _call_all, [(function, args) for args in each])
    return [list(found) for found in zip(*ranks, strict=True)]


def _call_all(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    return [function(*args) for function, args in calls]
