"""Memory that the ranks of one machine share: each maps the same pages, so a rank reads what another has written.

The memory is anonymous (memfd), without a name in /dev/shm, whose size a container limits. The kernel frees it when the
last process that maps it has ended in any way.
"""

import mmap
import os
import select
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.collectives import all_gather_objects
from moefold.comm.gloo_collectives import gathered_parts, sum_in_order, uses_gloo
from moefold.comm.groups import Group, collective_timeout
from moefold.comm.private_torch import foreach_copy_
from moefold.errors import RunError


@dataclass(frozen=True)
class SharedFile:
    """Address of an open file without a name (memory or a pipe) for the other processes of its machine."""

    boot_id: str
    """Identity of the machine."""
    pid: int
    descriptor: int
    identity: tuple[int, int]
    """Device and inode of the file. They differ for a process with the same number in another container."""


def share_file(descriptor: int) -> SharedFile:
    """Describe an open file of this process to the other processes of the machine."""
    status = os.fstat(descriptor)
    return SharedFile(_boot_id(), os.getpid(), descriptor, (status.st_dev, status.st_ino))


def open_shared_file(file: SharedFile, flags: int) -> int:
    """Open a file that another process of this machine holds open, and return the descriptor.

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
    """Allocate memory that all members of a group map. It is collective over the group.

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
        RunError: raised on all members if one cannot map the memory.
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
    for rank, fault in zip(group.ranks, reasons, strict=True):
        if fault:
            raise RunError(f"{purpose} needs memory that ranks share, and rank {rank} has none: {fault}")
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
        descriptor: descriptor of the segment in this process, or None if another process has created it.
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


LONGEST_POLL_MS = 2**31 - 1
"""About 25 days: the longest timeout of poll(2)."""
LABEL_BYTES = 4
"""Bytes of a signal between two members, which a pipe writes and reads as a whole."""


@dataclass(frozen=True)
class _BarrierStep:
    """A step of a barrier: tell one member that this rank has arrived, and wait until another member has arrived."""

    sends_to: int
    """Descriptor of the pipe of the member that gets this rank's label."""
    receives_from: int
    """Descriptor of this rank's pipe."""
    awaited: int
    """Rank that is waited for."""


class PipeBarrier:
    """Dissemination barrier (Hensgen, Finkel, Manber 1988): in step k, member i signals member i + 2^k.

    The pipes of a member that has ended are closed: members that wait for it get an error. The signal is a label of the
    operation that the barrier orders: members that have reached different operations get an error too.
    """

    def __init__(self, steps: list[_BarrierStep], timeout: timedelta) -> None:
        self._steps = steps
        self._timeout = timeout

    def wait(self, operation: object = "") -> None:
        """Return when all members have called this as often as this member.

        Args:
            operation: describes what the barrier orders. Its `repr` is the same on all members.

        Raises:
            DistError: a member has ended, or has not arrived within the time limit.
            RunError: a member has reached another operation.
        """
        label = zlib.crc32(repr(operation).encode()).to_bytes(LABEL_BYTES, "little")
        for step in self._steps:
            try:
                os.write(step.sends_to, label)
            except BrokenPipeError as error:
                raise dist.DistError("the pipe of another rank's barrier is closed: that rank has ended") from error
            poll = select.poll()
            poll.register(step.receives_from, select.POLLIN)
            if not poll.poll(min(self._timeout.total_seconds() * 1e3, LONGEST_POLL_MS)):
                raise dist.DistError(f"rank {step.awaited} has not reached a barrier within {self._timeout}")
            received = os.read(step.receives_from, LABEL_BYTES)
            if not received:
                raise dist.DistError(f"the pipe of rank {step.awaited} to this barrier is closed: it has ended")
            if received != label:
                raise RunError(
                    f"rank {step.awaited} has reached another operation in shared memory than this rank, which has "
                    f"reached {operation!r:.200}: ranks of a group must exchange the same tensors in the same order"
                )

    def __del__(self) -> None:
        """Close the pipes."""
        for step in self._steps:
            os.close(step.sends_to)
            os.close(step.receives_from)


def open_pipe_barrier(group: Group) -> PipeBarrier:
    """Connect the members of a group. It is collective.

    Raises:
        RunError: raised on all members if one cannot open the pipe of another.
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
    # A member closes its own writing ends only once the other members have opened them.
    reasons = all_gather_objects(reason, group)
    for _, write in ends:
        os.close(write)
    for rank, fault in zip(group.ranks, reasons, strict=True):
        if fault:
            for descriptor in (*sends, *(read for read, _ in ends)):
                os.close(descriptor)
            raise RunError(f"rank {rank} has no barrier by pipes: {fault}")
    steps = [
        _BarrierStep(send, read, group.ranks[(group.rank - distance) % group.size])
        for send, (read, _), distance in zip(sends, ends, distances, strict=True)
    ]
    return PipeBarrier(steps, collective_timeout(group.recorder.hang_timeout_s))


PIECE_BYTES = 4 << 20
"""Bytes that a rank publishes between two barriers: few barriers, and pieces that a cache holds."""


class SharedExchange:
    """Collectives of the members of a group. All members call the same collectives in the same order.

    The two halves of the memory are used alternately. A rank overwrites a half after the barrier that follows the next
    piece: every member enters that barrier only when it has read the old content of the half.

    Args:
        memory: shared memory, uint8 [2 * group.size * PIECE_BYTES].
    """

    def __init__(self, memory: Tensor, barrier: PipeBarrier, group: Group) -> None:
        self.barrier = barrier
        self._halves = memory.view(2, group.size, PIECE_BYTES)
        self.group = group
        self._turn = 0

    @property
    def memory(self) -> Tensor:
        """The shared memory."""
        return self._halves

    def has_members_of(self, group: dist.ProcessGroup) -> bool:
        """Return whether a process group, of any communicator, has the members of this exchange."""
        return tuple(dist.get_process_group_ranks(group)) == self.group.ranks

    def gather_into(self, out: Tensor, x: Tensor) -> None:
        """Concatenate equal-shaped tensors of the members along dim 0 into `out`. `x` may be a part of `out`."""
        self._gather([gathered_parts(out, x, self.group.size, self.group.rank)])

    def sum_scatter(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, tensor_indices: Sequence[int] = ()
    ) -> list[Tensor]:
        """Sum tensors over the members, in their order, and return this rank's rows of each sum.

        Args:
            tensors: of the same shapes on all members. Rows are cut as `torch.chunk` cuts them, so that the last
                members may have fewer, or none.
            dtype: of the sums. Tensors of another type are converted.
            tensor_indices: positions of the tensors in the list of the caller. Other positions on another member are an
                error.
        """
        size = self.group.size
        member_slices = [_slices_of_members(x, -(-len(x) // size) * x[:1].numel(), size) for x in tensors]
        totals = _allocate_flat([slices[self.group.rank] for slices in member_slices], dtype)
        self._sum(member_slices, totals, dtype, tensor_indices)
        return [total.view(-1, *x.shape[1:]) for total, x in zip(totals, tensors, strict=True)]

    def sum(self, tensors: Sequence[Tensor], dtype: torch.dtype, tensor_indices: Sequence[int] = ()) -> list[Tensor]:
        """Return the sums of tensors over the members, added in their order: the same bits on all members.

        `tensor_indices` as in `sum_scatter`.
        """
        totals = _allocate_flat(tensors, dtype)
        member_totals = [self._even_slices(total) for total in totals]
        own_totals = [slices[self.group.rank] for slices in member_totals]
        self._sum([self._even_slices(x) for x in tensors], own_totals, dtype, tensor_indices)
        self._gather(member_totals)
        return [total.view_as(x) for total, x in zip(totals, tensors, strict=True)]

    def _even_slices(self, x: Tensor) -> Sequence[Tensor]:
        return _slices_of_members(x, -(-x.numel() // self.group.size), self.group.size)

    def _gather(self, member_slices: Sequence[Sequence[Tensor]]) -> None:
        """Fill the other members' slices of tensors.

        Args:
            member_slices: for each tensor the slices of all members, flat. This rank's are filled.
        """
        dtype = member_slices[0][0].dtype
        for piece in _pieces(member_slices, PIECE_BYTES // dtype.itemsize):
            slots = self._next_half(dtype)
            piece_slices = [piece.slices_of(member_slices, member) for member in range(self.group.size)]
            published = [piece.slot_slices(slot, own) for slot, own in zip(slots, piece_slices, strict=True)]
            foreach_copy_(published[self.group.rank], piece_slices[self.group.rank])
            self.barrier.wait(("a gather of", dtype, piece.ranges))
            for member in range(self.group.size):
                if member != self.group.rank:
                    foreach_copy_(piece_slices[member], published[member])

    def _sum(
        self,
        member_slices: Sequence[Sequence[Tensor]],
        totals: Sequence[Tensor],
        dtype: torch.dtype,
        tensor_indices: Sequence[int],
    ) -> None:
        """Sum this rank's slices of tensors over the members.

        Args:
            member_slices: for each tensor the slices of all members, flat.
            totals: for each tensor the sum of this rank's slice, flat, which this fills.
            dtype: of the totals.
            tensor_indices: see `sum_scatter`.
        """
        size = self.group.size
        rank = self.group.rank
        width = PIECE_BYTES // dtype.itemsize // (size - 1)
        for piece in _pieces(member_slices, width):
            # slots[m, n]: the term that member m adds to the sum of the n-th of the other members.
            slots = self._next_half(dtype)[:, : (size - 1) * width].unflatten(1, (size - 1, width))
            piece_slices = [piece.slices_of(member_slices, member) for member in range(size)]
            own_slices = piece_slices.pop(rank)
            for slot, slices in zip(slots[rank], piece_slices, strict=True):
                foreach_copy_(piece.slot_slices(slot, slices), slices)
            self.barrier.wait(("a sum of", dtype, piece.ranges, tensor_indices))
            terms = [
                piece.slot_slices(slots[member, rank - (rank > member)], own_slices)
                for member in range(size)
                if member != rank
            ]
            terms.insert(rank, own_slices)
            own_totals = [totals[index][start:stop] for index, start, stop in piece.ranges]
            for total, addends in zip(own_totals, zip(*terms, strict=True), strict=True):
                sum_in_order(addends, total)

    def _next_half(self, dtype: torch.dtype) -> Tensor:
        """Return the half for the next piece, [group.size, elements]."""
        self._turn = 1 - self._turn
        return self._halves[self._turn].view(dtype)


@dataclass(frozen=True)
class _Piece:
    """A range of each of some tensors, which the members exchange between two barriers."""

    ranges: Sequence[tuple[int, int, int]]
    """Index of the tensor, start and end of the range in each slice. Shorter slices end earlier."""

    def slices_of(self, member_slices: Sequence[Sequence[Tensor]], member: int) -> list[Tensor]:
        """Return the ranges of a member's slices."""
        return [member_slices[index][member][start:stop] for index, start, stop in self.ranges]

    def slot_slices(self, slot: Tensor, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the ranges of slices in a slot."""
        lengths = [stop - start for _, start, stop in self.ranges]
        rooms = slot[: sum(lengths)].split(lengths)
        return [room[: len(own)] for room, own in zip(rooms, slices, strict=True)]


def _pieces(member_slices: Sequence[Sequence[Tensor]], length: int) -> Iterator[_Piece]:
    """Cut tensors into pieces of at most `length` elements of each member."""
    ranges: list[tuple[int, int, int]] = []
    room = length
    for index, (longest, *_) in enumerate(member_slices):
        start = 0
        while start < len(longest):
            stop = min(start + room, len(longest))
            ranges.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield _Piece(ranges)
                ranges = []
                room = length
    if ranges:
        yield _Piece(ranges)


def _slices_of_members(x: Tensor, length: int, size: int) -> Sequence[Tensor]:
    """Return the members' slices of a tensor, flat: `length` elements each, fewer or none for the last members."""
    flat = x.reshape(-1)
    return [flat[length * member : length * (member + 1)] for member in range(size)]


def _allocate_flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Allocate as many elements as tensors have, flat, one after the other."""
    lengths = [x.numel() for x in tensors]
    return torch.empty(sum(lengths), dtype=dtype).split(lengths)


def open_shared_exchange(group: Group, device: torch.device) -> SharedExchange | None:
    """Open an exchange, collectively. None if gloo does not serve the group or not all ranks can share memory."""
    if group.size == 1 or not uses_gloo(group.handle, device):
        return None
    try:
        memory = open_shared_memory(2 * group.size * PIECE_BYTES, group, "the exchange of shards")
        barrier = open_pipe_barrier(group)
    except RunError:
        # On all members: they are on several machines, or in containers that do not see each other.
        return None
    return SharedExchange(memory, barrier, group)
