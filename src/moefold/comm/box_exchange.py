"""One round of a plan of box transfers: an all-to-all of parts of tensors between the ranks of a group."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moefold.comm.collectives import all_to_all
from moefold.comm.groups import Group
from moefold.comm.reshard_plan import BoxTransfer

MAX_SCRATCH_BYTES = 1 << 26
"""Memory of the buffers of one round by default: sent and received bytes together."""


def exchange_boxes(
    transfers: Sequence[BoxTransfer],
    group: Group,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[BoxTransfer], Tensor],
    write: Callable[[BoxTransfer, Tensor], None],
) -> tuple[int, int]:
    """Send and receive the boxes of one round. It is collective over the group.

    Args:
        transfers: transfers of all members, the same on each member.
        group: the ranks. Sources and targets are numbers of members.
        device: device of the buffers. The group must be able to communicate from it.
        dtypes: type of each tensor in the messages.
        read: returns the values of a box that this rank sends, on any device.
        write: receives the values of a box that this rank gets, a view of the buffer.

    Returns:
        The bytes that this rank sent and received.
    """
    rank = group.rank
    sends = sorted((t for t in transfers if t.source == rank), key=lambda t: t.target)
    receives = sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)
    send_splits = [0] * group.size
    receive_splits = [0] * group.size
    for transfer in sends:
        send_splits[transfer.target] += num_bytes(transfer, dtypes)
    for transfer in receives:
        receive_splits[transfer.source] += num_bytes(transfer, dtypes)
    buffer = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
    first = 0
    for transfer in sends:
        _view(buffer, first, transfer, dtypes).copy_(read(transfer))
        first += num_bytes(transfer, dtypes)
    received = all_to_all(buffer, group, send_splits, receive_splits)
    first = 0
    for transfer in receives:
        write(transfer, _view(received, first, transfer, dtypes))
        first += num_bytes(transfer, dtypes)
    return sum(send_splits), sum(receive_splits)


def num_bytes(transfer: BoxTransfer, dtypes: Mapping[str, torch.dtype]) -> int:
    """Return the bytes of a transfer in a message."""
    return transfer.box.numel * dtypes[transfer.name].itemsize


def _view(buffer: Tensor, first: int, transfer: BoxTransfer, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Return the bytes of a transfer in a buffer as a tensor of its box."""
    content = buffer[first : first + num_bytes(transfer, dtypes)]
    return content.view(dtypes[transfer.name]).view(transfer.box.size)
