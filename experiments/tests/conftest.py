"""The fixtures of the tests of the package."""

from tests.conftest import (
    _no_plots,
    _same_random_numbers,
    fresh_pool,
    pool,
    pytest_make_parametrize_id,
    pytest_runtest_teardown,
)

__all__ = [
    "_no_plots",
    "_same_random_numbers",
    "fresh_pool",
    "pool",
    "pytest_make_parametrize_id",
    "pytest_runtest_teardown",
]
