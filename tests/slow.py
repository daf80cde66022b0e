"""Rows of parametrised tests that run in `make parity` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return rows of a parametrised test with the mark `slow`."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
