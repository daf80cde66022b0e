"""The barrier by pipes holds back every member until all have arrived, and ends when a member is gone."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moefold.comm import shared_memory
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.shared_memory import open_pipe_barrier, open_shared_memory
from moefold.errors import RunError
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity


def _group(size: int) -> Group:
    return ParallelGroups.create(fold(world_size=size), torch.device("cpu")).attn.dp_cp


def _arrivals(size: int) -> None:
    """Count arrivals in shared memory. After each barrier all members see all arrivals."""
    group = _group(size)
    counts = open_shared_memory(8 * size, group, "the test").view(torch.int64)
    barrier = open_pipe_barrier(group)
    for turn in range(1, 60):
        if turn % size == group.rank:
            time.sleep(0.002)
        counts[group.rank] = turn
        barrier.wait()
        assert counts.tolist() == [turn] * size
        barrier.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_member_passes_before_all_have_arrived(pool, size):
    pool.run(size, _arrivals, size)


def _one_ends(size: int) -> None:
    group = _group(size)
    barrier = open_pipe_barrier(group)
    barrier.wait()
    dist.barrier()
    if group.rank == 1:
        # The kernel does the same with the pipes of a killed process.
        del barrier
    else:
        with pytest.raises(dist.DistError, match="ended"):
            barrier.wait()
        del barrier
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_members_do_not_wait_for_a_lost_member(pool, size):
    pool.run(size, _one_ends, size)


def _one_is_late() -> str:
    group = _group(2)
    before = shared_memory.collective_timeout
    shared_memory.collective_timeout = lambda hang_timeout_s: timedelta(seconds=0.05)
    try:
        barrier = open_pipe_barrier(group)
    finally:
        shared_memory.collective_timeout = before
    text = ""
    if group.rank == 0:
        with pytest.raises(dist.DistError) as error:
            barrier.wait()
        text = str(error.value)
    dist.barrier()
    return text


def test_a_late_member_is_named(pool):
    assert pool.run(2, _one_is_late)[0].startswith("rank 1 has not reached a barrier within 0:00:00.05")


def _cannot_open() -> tuple[str, bool]:
    group = _group(3)
    descriptors = set(os.listdir("/proc/self/fd"))
    before = shared_memory.open_shared_file

    def refuse(file: object, flags: int) -> int:
        raise OSError("it is in another container")

    if group.rank == 1:
        shared_memory.open_shared_file = refuse
    try:
        with pytest.raises(RunError) as error:
            open_pipe_barrier(group)
    finally:
        shared_memory.open_shared_file = before
    return str(error.value), set(os.listdir("/proc/self/fd")) == descriptors


def test_all_members_refuse_where_one_cannot_open_a_pipe(pool):
    reason = "rank 1 has no barrier by pipes: it cannot open the pipe of another rank (it is in another container)"
    assert pool.run(3, _cannot_open) == [(reason, True)] * 3


def _at_different_operations(size: int) -> str:
    group = _group(size)
    barrier = open_pipe_barrier(group)
    barrier.wait("both")
    text = ""
    try:
        barrier.wait(("a sum", 1 if group.rank == 1 else 0))
    except (RunError, dist.DistError) as error:
        text = str(error)
    # A member that has found the difference ends; the members that wait for it get an error.
    del barrier
    dist.barrier()
    return text


@pytest.mark.parametrize("size", [2, 3, 4])
def test_members_at_different_operations_get_an_error(pool, size):
    texts = pool.run(size, _at_different_operations, size)
    assert "rank 0 has reached another operation in shared memory than this rank" in texts[1]
    assert all(text for text in texts)
