"""What ranks of the tests find in memory."""

import sys

from hypothesis import settings

from moefold.verify.ranks.pool import WorkerPool


def _speed_and_missing_modules() -> tuple[object, set[str]]:
    found = set(sys.modules)
    from tests.preload import MODULES

    return settings().deadline, {*MODULES, "tests.preload", "moefold.parts.wire.dtype"} - found


def test_a_rank_has_common_modules_and_no_time_limit_of_an_example(pool: WorkerPool) -> None:
    """The fork server leaves out what it cannot import, and says nothing."""
    assert pool.run(1, _speed_and_missing_modules) == [(None, set())]
