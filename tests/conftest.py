"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(scope="session")
def pool() -> object:
    """Forks gloo ranks from a process that imported torch once, for all parity tests of the session."""
    from moefold.testing.pool import WorkerPool

    return WorkerPool()
