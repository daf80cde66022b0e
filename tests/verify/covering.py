"""Rows of a table of factors in which every two levels of different factors meet at least once."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

TRIES = 100
"""Rows looked at for each that is taken; more make the table a little shorter."""


def all_rows(factors: Mapping[str, Sequence[str]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Return every legal row."""
    rows = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [row for row in rows if is_legal(row)]


def covering_rows(rows: Sequence[Row]) -> list[Row]:
    """Return few of the rows that between them have all the pairs of levels of all of them.

    Greedy and the same on every machine: of some rows with a pair that is still missing, the one with the most.
    """
    missing = set().union(*map(pairs_of, rows))
    with_pair: dict[Pair, list[Row]] = {}
    for row in rows:
        for pair in pairs_of(row):
            with_pair.setdefault(pair, []).append(row)
    draw, taken = random.Random(0), []
    while missing:
        candidates = with_pair[min(missing)]
        best = max(
            draw.sample(candidates, min(TRIES, len(candidates))), key=lambda row: len(missing & set(pairs_of(row)))
        )
        taken.append(best)
        missing -= set(pairs_of(best))
    return taken


def pairs_of(row: Row) -> list[Pair]:
    """Return every two levels of a row."""
    return list(combinations(row.items(), 2))
