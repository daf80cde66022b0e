"""One message for all ranks of a machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.errors import ConfigError
from moefold.launch.place import RankEnv
from moefold.launch.status import EXIT_USER_ERROR

RANK0_REPORT_WAIT_S = 10.0
"""A launcher ends all ranks once one has ended, also the first before it has spoken. So the others stay as long."""


@contextmanager
def report_on_local_rank0(rank_env: RankEnv | None) -> Iterator[None]:
    """Around what fails alike on all ranks of a machine: the first of them alone says so, and ends the others by that.

    Where a launcher lets ranks end one by one, they follow after `RANK0_REPORT_WAIT_S`.
    """
    try:
        yield
    except ConfigError:
        if rank_env is None or rank_env.local_rank == 0:
            raise
        time.sleep(RANK0_REPORT_WAIT_S)
        raise SystemExit(EXIT_USER_ERROR) from None
