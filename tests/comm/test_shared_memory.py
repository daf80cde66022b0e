"""Memory that ranks share: one set of pages, freed by the kernel when its ranks are gone."""

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moefold.comm import shared_memory
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.shared_memory import open_shared_memory
from moefold.errors import RunError
from moefold.launch.rank_pool import WorkerError
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity

NAME = "memfd:moefold-shared"
NUM_BYTES = 3 << 20


def _group(ep: int) -> Group:
    return ParallelGroups.create(fold(world_size=4, ep=ep), torch.device("cpu")).moe.ep


def _inode() -> str:
    """Inode of the memory that this process maps."""
    (inode,) = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line}
    return inode


def _processes_that_map(inodes: set[str]) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split() for line in path.read_text().splitlines() if NAME in line]
        except OSError:
            continue
        found += [path.parent.name for line in lines if line[4] in inodes]
    return found


def _write_and_read(ep: int) -> tuple[list[int], str, bool, bool]:
    group = _group(ep)
    names = set(os.listdir("/dev/shm"))
    memory = open_shared_memory(NUM_BYTES, group, "the test")
    is_empty = not memory.any()
    dist.barrier()
    memory.view(group.size, -1)[group.rank] = 1 + dist.get_rank()
    dist.barrier()
    values = memory.view(group.size, -1).amax(1).tolist()
    dist.barrier()
    return values, _inode(), is_empty, set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize("ep", [4, 2, 1])
def test_the_ranks_of_a_group_map_the_same_pages(pool, ep):
    found = pool.run(4, _write_and_read, ep)
    for rank, (values, _, is_empty, has_no_name) in enumerate(found):
        first = rank // ep * ep
        assert values == [1 + first + i for i in range(ep)]
        assert is_empty
        assert has_no_name
    assert len({inode for _, inode, _, _ in found}) == 4 // ep


def _die(folder: str) -> None:
    group = _group(4)
    memory = open_shared_memory(NUM_BYTES, group, "the test")
    memory.fill_(1)
    (Path(folder) / str(group.rank)).write_text(_inode())
    if os.fork() == 0:
        # A forked child, as of a pool of workers, does not keep the memory; the rank waits for the answer.
        (Path(folder) / f"child {group.rank}").write_text(str(NAME in Path("/proc/self/maps").read_text()))
        os._exit(0)
    os.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_ranks_leave_no_memory(pool, tmp_path):
    with pytest.raises(WorkerError, match="died"):
        pool.run(4, _die, str(tmp_path))
    inodes = {(tmp_path / str(rank)).read_text() for rank in range(4)}
    assert len(inodes) == 1
    assert _processes_that_map(inodes) == []
    assert {(tmp_path / f"child {rank}").read_text() for rank in range(4)} == {"False"}


def _open_elsewhere(kind: str) -> str:
    group = _group(4)
    if kind == "machine" and group.rank == 2:
        shared_memory._boot_id = lambda: "another machine"
    if kind == "container" and group.rank == 2:
        real = os.fstat
        with patch.object(os, "fstat", lambda fd: real(0)):
            return _message(group, NUM_BYTES)
    return _message(group, 1 << 60 if kind == "size" else NUM_BYTES)


def _message(group: Group, num_bytes: int) -> str:
    try:
        open_shared_memory(num_bytes, group, "rollout.experts='fetch'")
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("machine", "rank 2 has none: it cannot map the memory of rank 0 (it is on another machine)"),
        ("container", "rank 2 has none: it cannot map the memory of rank 0 (it is in another container)"),
        ("size", "rank 0 has none"),
    ],
)
def test_all_ranks_name_the_rank_that_cannot_map_the_memory(fresh_pool, kind, message):
    (text,) = set(fresh_pool.run(4, _open_elsewhere, kind))
    assert message in text
    assert text.startswith("rollout.experts='fetch' needs memory that ranks share, and ")
