"""Agreement of the processes of a program on the start of a run."""

from collections.abc import Callable
from typing import Any

import pytest

from moefold.comm.groups import World
from moefold.errors import ConfigError, RunError
from moefold.launch.in_process import ProgramRanks


class TwoRanks(World):
    """A world of this process and a second rank, which reports `other`."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other
        self.own: list[Any] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        self.own.append(value)
        return [value, self.other]


def _agree(call: Callable[[], Any], other: Any = None) -> tuple[Any, TwoRanks]:
    world = TwoRanks(None)
    ranks = ProgramRanks.__new__(ProgramRanks)
    ranks._world = world
    world.other = other
    try:
        return ranks.run_on_all_ranks(call), world
    except (ArithmeticError, ConfigError, RunError) as error:
        return error, world


def test_error_of_any_type_is_told_to_the_other_ranks():
    error, world = _agree(lambda: 1 // 0)
    assert isinstance(error, ZeroDivisionError)
    kind, text = world.own[0]
    assert kind is RunError
    assert text.startswith("ZeroDivisionError: ")


@pytest.mark.parametrize("kind", [ConfigError, RunError])
def test_error_of_another_rank_is_raised_with_its_number(kind):
    error, world = _agree(lambda: 5, (kind, "no"))
    assert type(error) is kind
    assert str(error) == "rank 1: no"
    assert world.own == [None]
    assert _agree(lambda: 5)[0] == 5
