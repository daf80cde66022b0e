"""All-gather and reduce-scatter of the ranks of one machine through memory that they share.

gloo sends every byte through the TCP stack, twice through the kernel: three quarters of the CPU time of a collective of
megabytes. Here a rank writes a piece of its data into shared memory, and after a barrier the others read it there.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.gloo_collectives import gathered_parts, sum_in_order, uses_gloo
from moefold.comm.groups import Group
from moefold.comm.pipe_barrier import PipeBarrier, open_pipe_barrier
from moefold.comm.shared_memory import open_shared_memory
from moefold.errors import RunError

PIECE_BYTES = 4 << 20
"""Bytes that a rank publishes between two barriers: few barriers, and pieces that a cache holds."""


class SharedExchange:
    """Collectives of the members of a group, which all call the same ones in the same order.

    There are two halves of the memory, used in turn. A rank overwrites a half after the barrier that follows the next
    piece, which every member enters when it has read what the half had.

    Args:
        memory: shared memory, uint8 [2 * group.size * PIECE_BYTES].
        barrier: of the members.
        group: the members.
    """

    def __init__(self, memory: Tensor, barrier: PipeBarrier, group: Group) -> None:
        self.barrier = barrier
        self._halves = memory.view(2, group.size, PIECE_BYTES)
        self.group = group
        self._turn = 0

    @property
    def memory(self) -> Tensor:
        """Return the shared memory."""
        return self._halves

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Return whether a process group, of any communicator, has the members of this exchange."""
        return tuple(dist.get_process_group_ranks(group)) == self.group.ranks

    def gather_into(self, out: Tensor, x: Tensor) -> None:
        """Concatenate equal-shaped tensors of the members along dim 0 into `out`, of which `x` may be a part."""
        parts = gathered_parts(out, x, self.group.size, self.group.rank)
        width = PIECE_BYTES // out.element_size()
        for pieces in zip(*(part.split(width) for part in parts), strict=True):
            slots = self._next_half(out.dtype)
            count = pieces[0].numel()
            slots[self.group.rank, :count].copy_(pieces[self.group.rank])
            self.barrier.wait()
            for member, piece in enumerate(pieces):
                if member != self.group.rank:
                    piece.copy_(slots[member, :count])

    def sum_scatter_into(self, out: Tensor, x: Tensor) -> None:
        """Sum tensors over the members, in their order; `out` gets this rank's part along dim 0."""
        size = self.group.size
        rank = self.group.rank
        parts = x.view(-1).chunk(size)
        width = PIECE_BYTES // x.element_size() // (size - 1)
        of_parts = zip(*(part.split(width) for part in parts), strict=True)
        for total, pieces in zip(out.view(-1).split(width), of_parts, strict=True):
            # slots[m, n]: what member m adds to the sum of the n-th of the other members.
            slots = self._next_half(x.dtype)[:, : (size - 1) * width].unflatten(1, (size - 1, width))
            count = total.numel()
            for slot, piece in zip(slots[rank], (*pieces[:rank], *pieces[rank + 1 :]), strict=True):
                slot[:count].copy_(piece)
            self.barrier.wait()
            received = [slots[member, rank - (rank > member), :count] for member in range(size) if member != rank]
            terms = [*received[:rank], pieces[rank], *received[rank:]]
            sum_in_order(terms, total)

    def _next_half(self, dtype: torch.dtype) -> Tensor:
        """Return the half for the next piece, [group.size, elements]."""
        self._turn = 1 - self._turn
        return self._halves[self._turn].view(dtype)


def open_shared_exchange(group: Group, device: torch.device) -> SharedExchange | None:
    """Open an exchange, collectively; None where gloo does not serve the group, or not all ranks can share memory."""
    if group.size == 1 or not uses_gloo(group.handle, device):
        return None
    try:
        memory = open_shared_memory(2 * group.size * PIECE_BYTES, group, "the exchange of shards")
        barrier = open_pipe_barrier(group)
    except RunError:
        # On all members: they are on several machines, or in containers that do not see each other.
        return None
    return SharedExchange(memory, barrier, group)
