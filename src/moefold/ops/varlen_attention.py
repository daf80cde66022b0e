"""Attention of many tasks on one rank: runs of queries, each with a run of keys that ends at its last query.

A query attends to the keys up to its own place and inside its window. Only visible blocks are computed. The flash
kernel of CUDA and the C kernel of a CPU compute all tasks in one call, on keys that are copied for each task. Elsewhere
a task is a causal block over its own rows and a block over earlier keys (`attention_block`), read in place.

Shapes: q [R, A, D], k and v [W, G, D], out [R, A, D], lse [R, A]. It does not communicate, and autograd does not record
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.host_copy import copy_to_device
from moefold.ops.block_attention import (
    BlockedWindow,
    BlockMask,
    CudaFlash,
    FlashMask,
    accumulation_dtype,
    attention_block,
    attention_block_backward,
    merge_lse_,
)
from moefold.ops.documents import Segments

if TYPE_CHECKING:
    from moefold.ops.cpu.attention import CAttention

Integers = NDArray[np.int64]

QueryTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Gradient of the output, queries, output, all [R, A, D], and log-sum-exp, [R, A]."""


@dataclass(frozen=True)
class _Block:
    """Part of a task: rows of the queries, rows of the keys, and the mask between them."""

    rows: slice
    keys: slice
    mask: BlockMask


class TaskAttention:
    """Forward and backward pass of the tasks of one rank.

    Args:
        rows: first row and row after the last of the queries of each task, int64 [K, 2]. The tasks cover all R rows.
        keys: first key and key after the last of each task, int64 [K, 2], at least as many as queries.
        window: sliding window: maximum number of keys of a query, its own included. 0: no limit.
    """

    def __init__(self, rows: Integers, keys: Integers, window: int, device: torch.device) -> None:
        self._rows = rows
        self._keys = keys
        self._window = window
        self._device = device

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kernel: "CAttention | None" = None) -> tuple[Tensor, Tensor]:
        """Return (out in the type of the queries, lse), by `kernel` or CUDA's flash kernel if it supports them."""
        if chosen := self._kernel_for(q, k, v, kernel):
            query, key, value = (x.unsqueeze(1) for x in (q, self._copy_keys(k), self._copy_keys(v)))
            out, lse = chosen.forward(query, key, value, self._flash_mask)
            return out.squeeze(1), lse.squeeze(1)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for own_block, past in self._task_blocks:
            own_out, own_lse = _attend(q, k, v, own_block)
            if past is not None:
                own_out = own_out.to(lse.dtype)
                num_rows = past.rows.stop - past.rows.start
                merge_lse_(own_out[:num_rows], own_lse[:num_rows], *_attend(q, k, v, past))
            out[own_block.rows] = own_out.squeeze(1)
            lse[own_block.rows] = own_lse.squeeze(1)
        return out, lse

    def backward(
        self, query_tensors: QueryTensors, k: Tensor, v: Tensor, kernel: "CAttention | None" = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq in the type of the queries, dk, dv in the type of sums).

        Args:
            query_tensors: gradient of the output, queries, output and finite log-sum-exp.
            kernel: as in the forward pass.
        """
        q = query_tensors[1]
        dtype = accumulation_dtype(q.dtype)
        if chosen := self._kernel_for(q, k, v, kernel):
            return self._backward_of_kernel(query_tensors, k, v, chosen)
        dk = torch.zeros_like(k, dtype=dtype, memory_format=torch.contiguous_format)
        dv = torch.zeros_like(v, dtype=dtype, memory_format=torch.contiguous_format)
        dq = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        for own_block, past in self._task_blocks:
            for block in (own_block,) if past is None else (own_block, past):
                block_dq, block_dk, block_dv = (x.squeeze(1) for x in _differentiate(query_tensors, k, v, block))
                if block is own_block:
                    dq[block.rows] = block_dq.to(dtype)
                else:
                    dq[block.rows] += block_dq
                dk[block.keys] += block_dk
                dv[block.keys] += block_dv
        return dq.to(q.dtype), dk, dv

    def _kernel_for(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: "CAttention | None"
    ) -> "CAttention | CudaFlash | None":
        """Return the kernel that computes all tasks in one call, or None if no kernel supports them."""
        if not len(q):
            return None
        longest = int(np.diff(self._keys).max())
        query, key, value = (x.unsqueeze(1) for x in (q, k, v))
        candidates = (kernel, CudaFlash()) if kernel is not None else (CudaFlash(),)
        return next((kernel for kernel in candidates if kernel.supports_tasks(query, key, value, longest)), None)

    def _backward_of_kernel(
        self, query_tensors: QueryTensors, k: Tensor, v: Tensor, kernel: "CAttention | CudaFlash"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv). Gradients of copies of a key are always added in the same order."""
        grad_out, q, out, lse = (x.unsqueeze(1) for x in query_tensors)
        key, value = (self._copy_keys(x).unsqueeze(1) for x in (k, v))
        gradients = kernel.backward(grad_out, q, key, value, out, lse, self._flash_mask)
        dq, *grads_kv = (x.squeeze(1) for x in gradients)
        dtype = accumulation_dtype(k.dtype)
        if self._copied_keys is None:
            dk, dv = (gradient.to(dtype) for gradient in grads_kv)
            return dq, dk, dv
        totals = [x.new_zeros(x.shape, dtype=dtype) for x in (k, v)]
        for total, gradient in zip(totals, grads_kv, strict=True):
            for places, keys in self._distinct_keys:
                total[keys] += gradient[places]
        return dq, totals[0], totals[1]

    def _copy_keys(self, x: Tensor) -> Tensor:
        """Return the keys or values of all tasks, one task after the other."""
        if self._copied_keys is not None:
            return x[self._copied_keys]
        assert len(x) == self._keys[-1, 1], (len(x), self._keys[-1])
        return x

    @cached_property
    def _flash_mask(self) -> FlashMask:
        return FlashMask(True, self._window - 1, self._segments(self._keys), self._segments(self._rows))

    def _segments(self, ranges: Integers) -> Segments:
        lengths = np.diff(ranges).ravel()
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        return Segments(self._to_device(ends), int(lengths.max()))

    @cached_property
    def _copied_keys(self) -> Tensor | None:
        """Rows of the keys of all tasks, one task after the other, int64. None means all rows in their order."""
        firsts = self._keys[:, 0]
        stops = self._keys[:, 1]
        if firsts[0] == 0 and (firsts[1:] == stops[:-1]).all():
            return None
        return self._to_device(np.concatenate([np.arange(first, stop) for first, stop in self._keys.tolist()]))

    @cached_property
    def _distinct_keys(self) -> list[tuple[Tensor, Tensor]]:
        """Parts of `_copied_keys` without repeated keys: their places in it, and their keys."""
        first_places = np.cumsum(np.diff(self._keys).ravel()) - np.diff(self._keys).ravel()
        chunks: list[list[int]] = []
        ends: list[int] = []
        for task, (first, stop) in enumerate(self._keys.tolist()):
            chunk = next((i for i, end in enumerate(ends) if end <= first), len(ends))
            if chunk == len(ends):
                chunks.append([])
                ends.append(0)
            chunks[chunk].append(task)
            ends[chunk] = stop
        return [
            (
                self._to_device(
                    np.concatenate([first_places[i] + np.arange(self._keys[i, 1] - self._keys[i, 0]) for i in members])
                ),
                self._to_device(np.concatenate([np.arange(*self._keys[i]) for i in members])),
            )
            for members in chunks
        ]

    @cached_property
    def _task_blocks(self) -> list[tuple[_Block, _Block | None]]:
        """For each task, the block over its own rows and the block over earlier keys, if any."""
        return list(self._blocks())

    def _blocks(self) -> Iterator[tuple[_Block, _Block | None]]:
        window = self._window
        ranges = zip(self._rows.tolist(), self._keys.tolist(), strict=True)
        for (first_row, stop_row), (first_key, stop_key) in ranges:
            num_rows = stop_row - first_row
            own_keys = slice(stop_key - num_rows, stop_key)
            own_block = _Block(slice(first_row, stop_row), own_keys, self._own_mask(num_rows))
            num_past = own_keys.start - first_key
            if not num_past:
                yield own_block, None
                continue
            # Rows whose windows begin after the earlier keys do not attend to them.
            seeing = min(num_rows, window - 1) if window else num_rows
            mask: BlockMask = "all"
            if window and num_past + seeing > window:
                distance = torch.arange(num_past, num_past + seeing)[:, None] - torch.arange(num_past)
                mask = (distance < window)[None].to(self._device)
            yield own_block, _Block(slice(first_row, first_row + seeing), slice(first_key, own_keys.start), mask)

    def _own_mask(self, num_rows: int) -> BlockMask:
        window = self._window
        if not window or window >= num_rows:
            return "causal"
        if self._device.type == "cpu" and BlockedWindow.is_worthwhile(window, num_rows):
            return BlockedWindow(window)
        distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
        return ((distance >= 0) & (distance < window))[None].to(self._device)

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return copy_to_device(torch.from_numpy(np.ascontiguousarray(values)), self._device)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a block, [rows, 1, A, D]."""
    tensors = (q[block.rows].unsqueeze(1), k[block.keys].unsqueeze(1), v[block.keys].unsqueeze(1))
    return attention_block(*tensors, block_mask=block.mask)


def _differentiate(query_tensors: QueryTensors, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients through a block, [rows or keys, 1, heads, D]."""
    grad_out, q, out, lse = (x[block.rows].unsqueeze(1) for x in query_tensors)
    keys = (k[block.keys].unsqueeze(1), v[block.keys].unsqueeze(1))
    return attention_block_backward(grad_out, q, *keys, out, lse, block_mask=block.mask)
