"""A communicator by itself, for tests of what takes one."""

from collections.abc import Sequence
from typing import Any

from moefold.parallel.flight_record import FlightRecorder
from moefold.parallel.groups import Group


def make_group(ranks: Sequence[int], rank: int, handle: Any) -> Group:
    """A group with a flight record of its own.

    Args:
        ranks: its members.
        rank: my place among them.
        handle: the process group; None for a group of one.
    """
    record = FlightRecorder()
    return Group(tuple(ranks), rank, handle, record, record.add_group("test", ranks))
