"""Fixtures of the tests of this folder."""

from tests.lasting_ranks import pool

__all__ = ["pool"]
