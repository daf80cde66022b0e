"""Covering arrays: rows of a table of factors that have every combination of `strength` levels at least once."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

import pytest

Row = Mapping[str, object]
Levels = tuple[tuple[str, object], ...]

TRIES = 100
"""Rows looked at for each that is taken; more make the table a little shorter."""


def all_rows(factors: Mapping[str, Sequence[str]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Return every legal row."""
    rows = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [row for row in rows if is_legal(row)]


def covering_rows(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """Return few of the rows that between them have all the combinations of levels of all of them.

    Greedy and the same on every machine: of some rows with a combination that is still missing, the one with the most.

    Args:
        rows: the table.
        strength: levels of so many factors are combined; 2 are pairs.
    """
    with_levels: dict[Levels, list[Row]] = {}
    for row in rows:
        for levels in levels_of(row, strength):
            with_levels.setdefault(levels, []).append(row)
    missing = set(with_levels)
    draw, taken = random.Random(0), []
    while missing:
        candidates = with_levels[min(missing)]
        best = max(
            draw.sample(candidates, min(TRIES, len(candidates))),
            key=lambda row: len(missing & set(levels_of(row, strength))),
        )
        taken.append(best)
        missing -= set(levels_of(best, strength))
    return taken


def levels_of(row: Row, strength: int = 2) -> list[Levels]:
    """Return every combination of so many levels of a row."""
    return list(combinations(row.items(), strength))


def few_else_slow(rows: Sequence[Row], few: Sequence[Row]) -> list[object]:
    """Return the rows as parameters of a test, all but a few marked slow."""
    return [pytest.param(row, marks=() if row in few else pytest.mark.slow) for row in rows]
