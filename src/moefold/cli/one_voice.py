"""One message for all ranks of a machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from moefold.errors import ConfigError
from moefold.launch.place import Place
from moefold.launch.status import EXIT_USER_ERROR


@contextmanager
def one_voice(place: Place | None) -> Iterator[None]:
    """Around what fails alike on all ranks of a machine: the first of them alone says so."""
    try:
        yield
    except ConfigError:
        if place is None or place.local_rank == 0:
            raise
        raise SystemExit(EXIT_USER_ERROR) from None
