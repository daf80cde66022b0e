"""Exchange of rows over symmetric memory, with split sizes that stay on the device: the host never waits for them.

Built on `torch.ops.symm_mem.all_to_all_vdev_2d` and its inverse `all_to_all_vdev_2d_offset` (torch 2.11, NVSHMEM).
Tested over gloo against an emulation of their contract. It has not been run on a GPU.
"""

from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.groups import Group
from moefold.comm.private_torch import NvshmemOps

ALIGNMENT_BYTES = 16
"""Rows start at multiples of this: copies between GPUs are fastest then."""


class SymmetricMemoryOps(Protocol):
    """Allocation of symmetric memory and the two all-to-alls on it, with the contract of torch's operators.

    A segment is the rows that one rank sends to one expert. Segments are in rank-major order on the side of the tokens
    (by global expert), and in expert-major order on the side of the experts (by local expert, then by source).
    """

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a symmetric tensor. It is collective, with the same size on every rank."""
        ...

    def dispatch(self, rows: Tensor, out: Tensor, splits_E: Tensor, out_splits_offsets: Tensor) -> None:
        """Send each segment of rows to the rank of its expert. All tensors are symmetric.

        Args:
            rows: rows to send, rank-major, [N, W].
            out: receives the rows, expert-major, [C, W].
            splits_E: rows of each segment to send, int64 [E].
            out_splits_offsets: receives rows and first row of each received segment, int64 [2, E].
        """
        ...

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        """Send segments back to the ranks of their tokens, as the inverse of `dispatch`.

        Args:
            rows: rows to send, expert-major, [C, W].
            out: receives the rows, rank-major, [N, W].
            splits_offsets: rows and first row of each segment to send, int64 [2, E].
            out_splits_offsets: receives rows and first row of each received segment, int64 [2, E].
        """
        ...


class RowExchange:
    """Buffers in symmetric memory and the exchanges through them, on one stream.

    Each rank of an exchange writes the sizes of its segments to its peers, waits for a barrier, and reads the rows from
    the send buffers of its peers. Until the barrier of the next exchange, a peer may therefore still read a send buffer
    of this exchange, and may already write the sizes of the next one. So two of each buffer alternate.

    Args:
        ops: operations on symmetric memory over the ranks of ep.
        num_experts: E, over all ranks.
        max_rows: largest number of rows that a rank sends.
        capacity: largest number of rows that a rank receives.
        row_bytes: bytes of the widest row.
    """

    def __init__(self, ops: SymmetricMemoryOps, num_experts: int, max_rows: int, capacity: int, row_bytes: int) -> None:
        self.capacity = capacity
        self._ops = ops
        num_bytes = max(max_rows, capacity) * -(-row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._send = [ops.empty(num_bytes, torch.uint8) for _ in range(2)]
        self._receive = ops.empty(num_bytes, torch.uint8)
        self._splits = [ops.empty(2 * num_experts, torch.int64) for _ in range(2)]
        self._out_splits = [ops.empty(2 * num_experts, torch.int64) for _ in range(2)]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in (*self._send, self._receive, *self._splits, *self._out_splits))

    def dispatch(self, rows_NW: Tensor, splits_E: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            rows_NW: rows sorted by expert. Rows after the last segment are not sent.
            splits_E: rows of each expert, int64 [E] on the device. No rank may receive more than `capacity`.

        Returns:
            (received rows sorted by local expert [capacity, W], undefined after the last segment, and the rows and
            first row of each received segment, int64 [2, E], as `combine` takes them).
        """
        send_rows, splits = self._fill_send_buffers(rows_NW, splits_E)
        received = _rows_view(self._receive, self.capacity, rows_NW)
        segments = self._out_splits[self._turn].view(2, -1)
        self._ops.dispatch(send_rows, received, splits, segments)
        return received.clone(), segments.clone()

    def combine(self, rows_CW: Tensor, segments: Tensor, num_rows: int) -> Tensor:
        """Send rows back to the ranks that sent them to `dispatch`.

        Args:
            rows_CW: rows in the order of `dispatch`. Rows after the last segment are not sent.
            segments: segments returned by `dispatch`.
            num_rows: N, rows that this rank gave to `dispatch`.

        Returns:
            The rows in the order of `dispatch`'s argument, [N, W], undefined after the last segment. Without rows the
            first row is zero, because rows of dropped tokens read it with factor 0.
        """
        send_rows, splits = self._fill_send_buffers(rows_CW, segments)
        returned = _rows_view(self._receive, num_rows, rows_CW)
        received = self._out_splits[self._turn].view(2, -1)
        self._ops.combine(send_rows, returned, splits, received)
        rows_NW = returned.clone()
        rows_NW[:1].masked_fill_(received[0].sum() == 0, 0.0)
        return rows_NW

    def _fill_send_buffers(self, rows: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
        self._turn = 1 - self._turn
        send_rows = _rows_view(self._send[self._turn], len(rows), rows).copy_(rows)
        return send_rows, self._splits[self._turn][: splits.numel()].view_as(splits).copy_(splits)


class MetaSymmetricMemory:
    """`SymmetricMemoryOps` on the meta device, where an exchange transfers nothing."""

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """See `SymmetricMemoryOps`."""
        return torch.empty(num_elements, dtype=dtype, device="meta")

    def dispatch(self, rows: Tensor, out: Tensor, splits_E: Tensor, out_splits_offsets: Tensor) -> None:
        """See `SymmetricMemoryOps`."""

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        """See `SymmetricMemoryOps`."""


def open_row_exchange(ep: Group, num_experts: int, max_rows: int, capacity: int, row_bytes: int) -> RowExchange:
    """Allocate symmetric memory over the ranks of ep, on CUDA with NVSHMEM. It is collective."""
    return RowExchange(NvshmemOps(ep.handle), num_experts, max_rows, capacity, row_bytes)


def _rows_view(buffer: Tensor, num_rows: int, like: Tensor) -> Tensor:
    """Return the start of a byte buffer as rows of the width and dtype of another tensor."""
    width = like.shape[1]
    return buffer[: num_rows * width * like.element_size()].view(like.dtype).view(num_rows, width)
