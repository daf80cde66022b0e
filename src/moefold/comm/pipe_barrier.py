"""Barrier of the ranks of one machine through pipes: two system calls a round, no thread and no busy wait.

gloo's barrier wakes its two threads for every message; with two ranks and 27 barriers a step that was 17 ms of CPU time
of each rank. Here a rank writes a byte to a pipe and sleeps in the read of another one. Both take the lock of the
pipe, so what a rank has written to shared memory before a barrier is what the others read after it.
"""

import os
import select
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import Group, collective_timeout
from moefold.comm.shared_memory import SharedFile, open_shared_file, share_file
from moefold.errors import RunError


@dataclass(frozen=True)
class _Round:
    """A round of a barrier: tell one member that this one has arrived, and wait until another one has."""

    sends_to: int
    """Descriptor of the pipe of the member that gets this one's byte."""
    receives_from: int
    """Descriptor of this rank's pipe."""
    awaited: int
    """Rank that is waited for."""


class PipeBarrier:
    """Dissemination barrier (Hensgen, Finkel, Manber 1988): in round k a member tells the one 2^k after it.

    A member that is gone has closed its pipes: those that wait for it get an error.
    """

    def __init__(self, rounds: list[_Round], timeout: timedelta) -> None:
        self._rounds = rounds
        self._timeout = timeout

    def wait(self) -> None:
        """Return when all members have called this as often as this one.

        Raises:
            DistError: a member is gone, or has not arrived within the time limit.
        """
        for step in self._rounds:
            try:
                os.write(step.sends_to, b".")
            except BrokenPipeError as error:
                raise dist.DistError("the pipe of another rank's barrier is closed: that rank has ended") from error
            poll = select.poll()
            poll.register(step.receives_from, select.POLLIN)
            if not poll.poll(self._timeout.total_seconds() * 1e3):
                raise dist.DistError(f"rank {step.awaited} has not reached a barrier within {self._timeout}")
            if not os.read(step.receives_from, 1):
                raise dist.DistError(f"the pipe of rank {step.awaited} to this barrier is closed: it has ended")

    def __del__(self) -> None:
        """Close the pipes."""
        for step in self._rounds:
            os.close(step.sends_to)
            os.close(step.receives_from)


def open_pipe_barrier(group: Group) -> PipeBarrier:
    """Connect the members of a group; collective.

    Raises:
        RunError: on all members, a member cannot open the pipe of another one.
    """
    distances = [1 << k for k in range((group.size - 1).bit_length())]
    ends: list[tuple[int, int]] = []
    sends: list[int] = []
    reason = ""
    try:
        ends = [os.pipe() for _ in distances]
    except OSError as error:
        reason = f"it cannot create a pipe ({error.strerror or error})"
    offered: list[list[SharedFile]] = all_gather_objects([share_file(write) for _, write in ends], group)
    if all(len(files) == len(distances) for files in offered):
        try:
            for files, distance in zip(zip(*offered, strict=True), distances, strict=True):
                sends.append(open_shared_file(files[(group.rank + distance) % group.size], os.O_WRONLY))
        except OSError as error:
            reason = f"it cannot open the pipe of another rank ({error.strerror or error})"
    # A member closes its own writing ends only once the others have opened them.
    reasons = all_gather_objects(reason, group)
    for _, write in ends:
        os.close(write)
    for rank, found in zip(group.ranks, reasons, strict=True):
        if found:
            for descriptor in (*sends, *(read for read, _ in ends)):
                os.close(descriptor)
            raise RunError(f"rank {rank} has no barrier by pipes: {found}")
    rounds = [
        _Round(send, read, group.ranks[(group.rank - distance) % group.size])
        for send, (read, _), distance in zip(sends, ends, distances, strict=True)
    ]
    return PipeBarrier(rounds, collective_timeout(group.recorder.hang_timeout_s))
