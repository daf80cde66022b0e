"""Fixtures of the tests of benchmarks."""

from tests.bench.conftest import group_of_one

__all__ = ["group_of_one"]
