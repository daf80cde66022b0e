"""The fixtures of the tests of the package."""

from tests.conftest import _no_plots, _same_random_numbers, fresh_pool
from tests.lasting_ranks import pool

__all__ = ["_no_plots", "_same_random_numbers", "fresh_pool", "pool"]
