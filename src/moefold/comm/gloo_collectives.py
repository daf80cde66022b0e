"""All-gather and reduce-scatter of FSDP's shards by messages between the members of a gloo group.

torch's reduce-scatter on gloo copies its input, all-reduces the copy and keeps a part of it: twice the bytes on the
wire. Its all-gather receives into a separate buffer and copies from there. Here each member sends directly from the
caller's tensors, and receives into them.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.private_torch import gloo_backend

GATHER_TAG = 2
REDUCE_TAG = 3
"""Tags of messages. Ring communication in `comm/collectives.py` has other tags."""

NO_TIMEOUT = timedelta(0)
"""Stands for the timeout of the process group, as in torch."""


class _Messages(dist.Work):
    """Messages of a collective in flight. They keep the tensors of the messages.

    Args:
        receives: the receives, in the order of the members.
        finish: computes the result from the received tensors.
    """

    def __init__(self, receives: Sequence[dist.Work], sends: Sequence[dist.Work], finish: Callable[[], None]) -> None:
        super().__init__()
        self._receives = receives
        self._sends = sends
        self._finish = finish

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the result is complete and the sent tensors may change."""
        for work in self._receives:
            work.wait(timeout)
        self._finish()
        for work in self._sends:
            work.wait(timeout)
        return True


def uses_gloo(handle: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether gloo runs the collectives of a process group on tensors of a device, in host memory."""
    return device.type == "cpu" and gloo_backend(handle) is not None


def begin_gather(out: Tensor, x: Tensor, handle: dist.ProcessGroup) -> dist.Work:
    """Start to concatenate equal-shaped tensors of the members along dim 0 into `out`. `x` may be a part of `out`.

    Args:
        out: contiguous.
        x: contiguous. It must not change until the work is done.
        handle: a gloo group, all of whose members call this.
    """
    shards = gathered_parts(out, x, handle.size(), handle.rank())
    return _exchange([shards[handle.rank()]] * len(shards), shards, handle, GATHER_TAG, lambda: None)


def begin_sum_scatter(out: Tensor, x: Tensor, handle: dist.ProcessGroup) -> dist.Work:
    """Start to sum tensors over the members. `out` gets this rank's part along dim 0, added in the members' order.

    Args:
        out: contiguous.
        x: contiguous. It must not change until the work is done.
        handle: a gloo group, all of whose members call this.
    """
    size = handle.size()
    rank = handle.rank()
    shards = x.view(-1).chunk(size)
    total = out.view(-1)
    peers = [member for member in range(size) if member != rank]
    spare = total.new_empty(max(size - 2, 0), total.numel())
    received = dict(zip(peers, [total, *spare], strict=True)) | {rank: shards[rank]}
    terms = [received[member] for member in range(size)]

    return _exchange(shards, terms, handle, REDUCE_TAG, lambda: sum_in_order(terms, total))


def gathered_parts(out: Tensor, x: Tensor, size: int, rank: int) -> Sequence[Tensor]:
    """Return the parts of a gathered tensor, flat, in the order of the members. This rank's own part is filled."""
    shards = out.view(-1).chunk(size)
    if shards[rank].data_ptr() != x.data_ptr():
        shards[rank].copy_(x.view(-1))
    return shards


def sum_in_order(terms: Sequence[Tensor], total: Tensor) -> None:
    """Write the sum of two or more terms, added in their order, to `total`, which may be one of the first two."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


def _exchange(
    sent: Sequence[Tensor], received: Sequence[Tensor], handle: dist.ProcessGroup, tag: int, finish: Callable[[], None]
) -> dist.Work:
    """Send one tensor to each other member and receive one from each. The items of this rank are not used."""
    rank = handle.rank()
    size = handle.size()
    # Member r starts with r + 1: no member gets all messages first.
    peers = [(rank + step) % size for step in range(1, size)]
    receives = [dist.irecv(received[member], group=handle, group_src=member, tag=tag) for member in sorted(peers)]
    sends = [dist.isend(sent[member], group=handle, group_dst=member, tag=tag) for member in peers]
    return _Messages([work for work in receives if work], [work for work in sends if work], finish)
