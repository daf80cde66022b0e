"""A stand-in for torch's all-to-alls on symmetric memory: their contract in plain tensors over gloo.

It knows nothing of the dispatcher. Its writes follow the description of `all_to_all_vdev_2d` in torch: the source
is rank-major, the destination expert-major, and the offsets of the received segments are written beside their sizes.
Everything else in a destination is NaN, so that a row that was not received is noticed when it is read.

On GPUs, peers write the sizes and offsets of their segments before the barrier of an exchange, and read rows after it.
So a peer may still read the rows of one exchange, and write the sizes of the next one, while this rank is between both:
no buffer may serve two exchanges in succession.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm import row_exchange
from moefold.comm.row_exchange import RowExchange
from moefold.config.base.part_registry import find_part


class StandInOps:
    """`comm.row_exchange.SymmetricMemoryOps` over a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._symmetric: list[int] = []
        self._last_accessed_by_peers: set[int] = set()
        self.calls: list[str] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        sizes: list[object] = [None] * self._size
        dist.all_gather_object(sizes, (num_elements, dtype), group=self._group)
        assert len(set(sizes)) == 1, "symmetric memory has one size on all ranks"
        tensor = torch.zeros(num_elements, dtype=dtype)
        self._symmetric.append(tensor.untyped_storage().data_ptr())
        return tensor

    def dispatch(self, rows: Tensor, out: Tensor, splits_E: Tensor, out_splits_offsets: Tensor) -> None:
        self._check(rows, out, splits_E, out_splits_offsets)
        self.calls.append("dispatch")
        splits = splits_E.view(self._size, -1)
        segments = rows[: int(splits.sum())].split(splits.flatten().tolist())
        per_rank = [torch.cat(segments[rank * splits.shape[1] :][: splits.shape[1]]) for rank in range(self._size)]
        received, counts = self._exchange(per_rank, splits)
        # [experts here, sources]
        in_order = counts.t()
        by_source = [part.split(sizes.tolist()) for part, sizes in zip(received, counts, strict=True)]
        ordered = [by_source[source][expert] for expert in range(in_order.shape[0]) for source in range(self._size)]
        self._write(out, ordered)
        out_splits_offsets.copy_(_with_offsets(in_order.flatten()))

    def combine(self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor) -> None:
        self._check(rows, out, splits_offsets, out_splits_offsets)
        self.calls.append("combine")
        sizes, offsets = (row.view(-1, self._size) for row in splits_offsets)
        per_rank = [
            torch.cat([rows[at : at + size] for size, at in zip(sizes[:, rank], offsets[:, rank], strict=True)])
            for rank in range(self._size)
        ]
        received, counts = self._exchange(per_rank, sizes.t().contiguous())
        self._write(out, received)
        out_splits_offsets.copy_(_with_offsets(counts.flatten()))

    def _exchange(self, per_rank: list[Tensor], splits: Tensor) -> tuple[list[Tensor], Tensor]:
        """Exchange the rows for each rank, and the sizes of their segments: [sources, segments]."""
        counts = torch.empty_like(splits)
        dist.all_to_all_single(counts, splits.contiguous(), group=self._group)
        sizes = counts.sum(1).tolist()
        received = per_rank[0].new_empty(sum(sizes), per_rank[0].shape[1])
        dist.all_to_all_single(
            received, torch.cat(per_rank), sizes, [len(rows) for rows in per_rank], group=self._group
        )
        return list(received.split(sizes)), counts

    def _write(self, out: Tensor, parts: list[Tensor]) -> None:
        rows = torch.cat(parts)
        assert len(rows) <= len(out), "the rows would be written beyond the buffer"
        out.fill_(float("nan"))
        out[: len(rows)] = rows

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() in self._symmetric, "a tensor is not in symmetric memory"
            assert tensor.storage_offset() == 0
            assert tensor.is_contiguous()
        assert tensors[2].dtype == tensors[3].dtype == torch.int64
        rows, _, _, out_splits_offsets = tensors
        accessed = {tensor.untyped_storage().data_ptr() for tensor in (rows, out_splits_offsets)}
        assert not accessed & self._last_accessed_by_peers, "peers may still access a buffer of the last exchange"
        self._last_accessed_by_peers = accessed


def _with_offsets(sizes: Tensor) -> Tensor:
    ends = list(accumulate(sizes.tolist()))
    return torch.stack((sizes, torch.tensor([0, *ends[:-1]])))


@contextmanager
def symmetric_memory(ops: type[StandInOps] = StandInOps) -> Iterator[None]:
    """Let `parallelize` open its exchange over the stand-in, on any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_part("dispatcher", "symm_mem"), "unsupported_here", lambda part, device: iter(()))
        patch.setattr(row_exchange, "open_row_exchange", lambda ep, *sizes: RowExchange(ops(ep.handle), *sizes))
        yield
