"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Gloo ranks that imported torch once, shared by all parity tests of the session."""
    from moefold.testing.pool import WorkerPool

    with WorkerPool() as workers:
        yield workers
