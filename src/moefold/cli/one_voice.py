"""One message for all ranks of a machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from moefold.errors import ConfigError
from moefold.launch.place import Place
from moefold.launch.status import EXIT_USER_ERROR

FIRST_SPEAKS_S = 10.0
"""A launcher ends all ranks once one has ended, also the first before it has spoken. So the others stay as long."""


@contextmanager
def one_voice(place: Place | None) -> Iterator[None]:
    """Around what fails alike on all ranks of a machine: the first of them alone says so, and ends the others by that.

    Where a launcher lets ranks end one by one, they follow after `FIRST_SPEAKS_S`.
    """
    try:
        yield
    except ConfigError:
        if place is None or place.local_rank == 0:
            raise
        time.sleep(FIRST_SPEAKS_S)
        raise SystemExit(EXIT_USER_ERROR) from None
