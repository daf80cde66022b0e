"""What travels round the ring of a group, a member further at a time, while the caller computes. No gradients."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.groups import Group

BLOCK_TAG = 0
SUM_TAG = 1
"""Tags of messages: blocks that go round, and sums of shares, which may be under way at the same time."""


def ring_pass(block: Tensor, group: Group, buffers: Sequence[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, block) of each member, mine first, then backwards round the ring.

    While the caller computes with one block, the next is on its way.

    Args:
        block: mine, contiguous; only read.
        group: the members, whose blocks have one shape.
        buffers: where the block of each member is to stand, contiguous; mine is not copied there. None: a block is valid
            until the iterator moves on.
    """
    held = block
    spare = None
    for step in range(group.size - 1):
        source = (group.rank - step) % group.size
        if buffers is not None:
            incoming = buffers[source - 1]
        else:
            incoming = torch.empty_like(block) if spare is None else spare
        under_way = send_recv(held, incoming, group, BLOCK_TAG)
        yield source, held
        wait_all(under_way, group)
        held, spare = incoming, None if held is block else held
    yield (group.rank + 1) % group.size, held


def ring_reduce_scatter(partial_sum: Callable[[int], Tensor], group: Group) -> Tensor:
    """The sum over the members of the shares that are for me, as a reduce-scatter gives it.

    While the caller computes a share, the sum of the one before is on its way. Sums are rounded to the type of the
    shares at every member, and added in the order of the ring, from the member behind the one that they are for.

    Args:
        partial_sum: makes my share for a member, which is changed; contiguous, all of one shape.
        group: the members.
    """
    total = partial_sum((group.rank - 1) % group.size)
    for step in range(1, group.size):
        incoming = torch.empty_like(total)
        under_way = send_recv(total, incoming, group, SUM_TAG)
        mine = partial_sum((group.rank - 1 - step) % group.size)
        wait_all(under_way, group)
        total = mine.add_(incoming)
    return total


def send_recv(send: Tensor, receive: Tensor, group: Group, tag: int) -> list[dist.Work]:
    """Start sending to the next member and receiving from the one before; leave both tensors alone until then."""
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
    """Wait for what was passed on."""
    with group.comm_timer.waiting():
        for work in works:
            work.wait()
