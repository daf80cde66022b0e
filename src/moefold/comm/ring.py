"""Ring communication: pass blocks or partial sums to the next rank while the caller computes. No gradients."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.groups import Group

BLOCK_TAG = 0
SUM_TAG = 1
"""Message tags of blocks and of partial sums, which may be in flight at the same time."""


def ring_pass(block: Tensor, group: Group, buffers: Sequence[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, block) of each member, this rank's first, then backwards round the ring.

    While the caller computes with one block, the next one is in flight.

    Args:
        block: this rank's block, contiguous; only read.
        group: the members, whose blocks have equal shapes.
        buffers: contiguous buffers for the blocks of the other members; this rank's block is not copied there. None: a
            block is valid until the iterator advances.
    """
    current = block
    spare = None
    for step in range(group.size - 1):
        source = (group.rank - step) % group.size
        if buffers is not None:
            incoming = buffers[source - 1]
        else:
            incoming = torch.empty_like(block) if spare is None else spare
        works = send_recv(current, incoming, group, BLOCK_TAG)
        yield source, current
        wait_all(works, group)
        current, spare = incoming, None if current is block else current
    yield (group.rank + 1) % group.size, current


def ring_reduce_scatter(partial_sum: Callable[[int], Tensor], group: Group) -> Tensor:
    """Reduce-scatter in a ring: sum over the members of their partial sums for this rank.

    While the caller computes a partial sum, the previous sum is in flight. Sums are rounded to the type of the partial
    sums at every member, and added in ring order, starting with the member after the destination.

    Args:
        partial_sum: computes this rank's partial sum for a member, overwritten here; contiguous, all of one shape.
        group: the members.
    """
    total = partial_sum((group.rank - 1) % group.size)
    for step in range(1, group.size):
        incoming = torch.empty_like(total)
        works = send_recv(total, incoming, group, SUM_TAG)
        own_sum = partial_sum((group.rank - 1 - step) % group.size)
        wait_all(works, group)
        total = own_sum.add_(incoming)
    return total


def send_recv(send: Tensor, receive: Tensor, group: Group, tag: int) -> list[dist.Work]:
    """Start sending to the next member and receiving from the previous one; keep both tensors until `wait_all`."""
    if group.size == 1:
        receive.copy_(send)
        return []
    group.record_collective("ring exchange", send)
    after = group.ranks[(group.rank + 1) % group.size]
    before = group.ranks[(group.rank - 1) % group.size]
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, after, group.handle, tag),
            dist.P2POp(dist.irecv, receive, before, group.handle, tag),
        ]
    )


def wait_all(works: list[dist.Work], group: Group) -> None:
    """Wait for the sends and receives of `send_recv`."""
    with group.comm_timer.waiting():
        for work in works:
            work.wait()
