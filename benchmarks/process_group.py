"""Process groups outside a mapping, for tests and benchmarks."""

from collections.abc import Sequence
from typing import Any

from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import Group


def make_group(ranks: Sequence[int], rank: int, handle: Any) -> Group:
    """Create a group with its own flight recorder.

    Args:
        ranks: global ranks of the members.
        rank: rank of this process in the group.
        handle: the process group; None for a group of one.
    """
    recorder = FlightRecorder()
    return Group(tuple(ranks), rank, handle, recorder, recorder.add_group("test", ranks))
