"""Memory that the ranks of one machine share: each maps the same pages, so a rank reads what another has written.

The memory is anonymous (memfd): it has no name in /dev/shm, whose size a container limits, and the kernel frees it when
the last process that maps it has ended, however it ends.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_objects
from moefold.comm.groups import Group
from moefold.errors import RunError


@dataclass(frozen=True)
class SharedFile:
    """An open file without a name, memory or a pipe, as the other processes of its machine find it."""

    boot_id: str
    """Of the machine."""
    pid: int
    descriptor: int
    identity: tuple[int, int]
    """Device and inode of the file, which tell it from the file of a process with the same number elsewhere."""


def share_file(descriptor: int) -> SharedFile:
    """Describe an open file of this process to the other processes of the machine."""
    status = os.fstat(descriptor)
    return SharedFile(_boot_id(), os.getpid(), descriptor, (status.st_dev, status.st_ino))


def open_shared_file(file: SharedFile, flags: int) -> int:
    """Open a file that another process of this machine holds open; return the descriptor.

    Raises:
        OSError: it cannot be opened, or belongs to another machine or container.
    """
    if file.boot_id != _boot_id():
        raise OSError("it is on another machine")
    opened = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", flags)
    status = os.fstat(opened)
    if (status.st_dev, status.st_ino) != file.identity:
        os.close(opened)
        raise OSError("it is in another container")
    return opened


def open_shared_memory(num_bytes: int, group: Group, purpose: str) -> Tensor:
    """Allocate memory that all members of a group map; collective over the group.

    Writes become visible to the other members, but are not ordered: a barrier must lie between a write and a read.
    Pages are allocated by the first rank that writes to them, near to its processor. Child processes of a rank do not
    inherit the memory.

    Args:
        num_bytes: size, the same on all members, at least 1.
        group: ranks of one machine.
        purpose: the setting that needs the memory, for error messages.

    Returns:
        uint8 [num_bytes], of zeros.

    Raises:
        RunError: on all members, a member cannot map the memory.
    """
    descriptor: int | None = None
    segment: SharedFile | None = None
    reason = ""
    if group.rank == 0:
        try:
            descriptor = _create(num_bytes)
            segment = share_file(descriptor)
        except OSError as error:
            reason = f"{num_bytes} bytes cannot be allocated ({error.strerror or error})"
    created: SharedFile | None = all_gather_objects(segment, group)[0]
    memory: Tensor | None = None
    if created is not None:
        try:
            memory = _map(created, num_bytes, descriptor)
        except OSError as error:
            reason = f"it cannot map the memory of rank {group.ranks[0]} ({error.strerror or error})"
    # The first member closes its descriptor only once all others have opened it.
    reasons = all_gather_objects(reason, group)
    if descriptor is not None:
        os.close(descriptor)
    for rank, found in zip(group.ranks, reasons, strict=True):
        if found:
            raise RunError(f"{purpose} needs memory that ranks share, and rank {rank} has none: {found}")
    assert memory is not None
    return memory


def _create(num_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has memfd_create")
    descriptor = os.memfd_create("moefold-shared")
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(file: SharedFile, num_bytes: int, descriptor: int | None) -> Tensor:
    """Map a segment.

    Args:
        file: the segment.
        num_bytes: its size.
        descriptor: of the segment in this process; None: another process has created it.
    """
    opened = open_shared_file(file, os.O_RDWR) if descriptor is None else descriptor
    try:
        pages = mmap.mmap(opened, num_bytes)
    finally:
        if opened != descriptor:
            os.close(opened)
    # A forked child, such as a worker of a reward function, would keep the memory after its rank has ended.
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
