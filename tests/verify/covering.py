"""Covering arrays: rows of a table of factors that have every combination of `strength` levels at least once."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import TypeVar

import pytest

Row = Mapping[str, object]
R = TypeVar("R", bound=Row)
Levels = tuple[tuple[str, object], ...]

TRIES = 100
"""Rows tried for each that is taken; more make the table a little shorter."""


def levels_of(row: Row, strength: int = 2) -> list[Levels]:
    """Return every combination of `strength` levels of a row."""
    return list(combinations(row.items(), strength))


def all_rows(factors: Mapping[str, Sequence[str]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Return every legal row."""
    rows = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [row for row in rows if is_legal(row)]


def covering_rows(rows: Sequence[R], levels: Callable[[R], list[Levels]] = levels_of) -> list[R]:
    """Return few of the rows that between them have all the combinations of levels of all of them.

    Greedy and the same on every machine: of some rows with a combination that is still missing, the one with the most.

    Args:
        rows: the table.
        levels: the combinations of a row; pairs of all its factors by default.
    """
    with_levels: dict[Levels, list[R]] = {}
    for row in rows:
        for combination in levels(row):
            with_levels.setdefault(combination, []).append(row)
    missing = set(with_levels)
    draw, taken = random.Random(0), []
    while missing:
        candidates = with_levels[min(missing)]
        tried = draw.sample(candidates, min(TRIES, len(candidates)))
        best = max(tried, key=lambda row: len(missing & set(levels(row))))
        taken.append(best)
        missing -= set(levels(best))
    return taken


def few_else_slow(rows: Sequence[Row], few: Sequence[Row]) -> list[object]:
    """Return the rows as parameters of a test, all but a few marked slow."""
    return [pytest.param(row, marks=() if row in few else pytest.mark.slow) for row in rows]
