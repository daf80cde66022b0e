"""What FSDP sends, watched: the time that a rank waits in it, and scalar products of gradients before they add up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefold.moe.experts import Experts
from moefold.parallel.collectives import all_gather_into, all_reduce_sum, all_to_all, reduce_scatter_into
from moefold.parallel.groups import Group, ParallelGroups
from moefold.parallel.wait_clock import CommTimer, Timestamp


class PerRankGradDots:
    """The matrix <g_i, g_j> over the members i, j of a data-parallel group, g_i what member i brings to the reduction.

    Member k gets the k-th part of every g_i by an all-to-all of the bytes that the reduction sends anyway, and adds
    the products of these parts to its matrix; the sum of the matrices of all members is exact. Nothing is sent unless
    `is_enabled`. On a checked step each member holds one more copy of the gradient of one FSDP module at a time.

    With ZeRO 2 and 3 the gradients of each micro-batch are reduced by themselves: the products are then those of the
    micro-batches, added up.

    It is what FSDP calls a custom reduce-scatter (`FSDPModule.set_custom_reduce_scatter`), and under ZeRO 0, where
    nothing is scattered, it looks at the buffer that FSDP allocates through it once that has been all-reduced.
    """

    def __init__(self, group: Group, *, replicates: bool) -> None:
        self.is_enabled = False
        self._group = group
        self._replicates = replicates
        self._buffers: list[Tensor] = []
        self._gram_matrix: Tensor | None = None
        self._all_reduce_start: Timestamp | None = None

    def attach(self, module: FSDPModule) -> None:
        """Look at all that the module reduces from now on, and time it."""
        module.set_custom_all_gather(TimedAllGather(self._group.comm_timer))  # type: ignore[arg-type]  # as below
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # the class to inherit from is private
        if self._replicates:
            module.set_all_reduce_hook(self._after_all_reduce)

    def pop(self, device: torch.device) -> Tensor:
        """My part of the matrix since the last call, float64 [group.size, group.size]; disarms."""
        size = self._group.size
        matrix = (
            torch.zeros(size, size, dtype=torch.float64, device=device)
            if self._gram_matrix is None
            else self._gram_matrix
        )
        self.is_enabled, self._gram_matrix = False, None
        return matrix

    def is_local_grad_finite(self, device: torch.device) -> bool:
        """Whether what I brought to the reductions since I was armed is finite; disarms. Collective over the group."""
        squares = all_reduce_sum(self.pop(device).diagonal(), self._group)
        return bool(torch.isfinite(squares[self._group.rank]))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffers of a reduction, what goes in before what comes out."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._replicates:
            self._buffers.append(buffer)
            if len(self._buffers) == 2:
                # What comes out is allocated right before it is all-reduced.
                self._all_reduce_start = self._group.comm_timer.enter(is_waiting=True)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter, as FSDP would by itself."""
        if self.is_enabled and not self._replicates:
            self._accumulate_dots(input_tensor)
        with self._group.comm_timer.waiting():
            return reduce_scatter_into(output_tensor, input_tensor, group, op, async_op=async_op)

    def _after_all_reduce(self, output: Tensor) -> None:
        self._group.comm_timer.leave(self._all_reduce_start)
        if self.is_enabled:
            sent = self._buffers[0]
            if sent.is_cuda:
                # FSDP frees it once its reduce-scatter is over, which is before this stream, the one of the all-reduce,
                # has read it: without the note the stream it was allocated on might write other gradients into it.
                sent.record_stream(torch.cuda.current_stream())
            self._accumulate_dots(sent)
        self._buffers.clear()

    @torch.no_grad()
    def _accumulate_dots(self, gradient: Tensor) -> None:
        size = self._group.size
        if size == 1:
            return
        padded = nn.functional.pad(gradient, (0, -gradient.numel() % size)).view(size, -1)
        parts = all_to_all(padded, self._group, [1] * size, [1] * size).double()
        products = parts @ parts.T
        self._gram_matrix = products if self._gram_matrix is None else self._gram_matrix + products


class TimedAllGather:
    """What FSDP gathers parameters with, as it would by itself, on the clock of waiting."""

    def __init__(self, comm_timer: CommTimer) -> None:
        self._comm_timer = comm_timer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """All-gather along dim 0."""
        with self._comm_timer.waiting():
            return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


@dataclass(frozen=True)
class FSDPCommHooks:
    """The watches over both kinds of parameters."""

    dense: PerRankGradDots
    experts: PerRankGradDots

    def enable(self) -> None:
        """Look at the gradients of the backward passes that follow, until they are asked for."""
        self.dense.is_enabled = self.experts.is_enabled = True

    def are_local_grads_finite(self, device: torch.device) -> bool:
        """Whether my gradients were finite before they were added to those of others; collective."""
        found = [products.is_local_grad_finite(device) for products in (self.dense, self.experts)]
        return all(found)


def install_comm_hooks(stages: Sequence[nn.Module], groups: ParallelGroups, zero: int) -> FSDPCommHooks:
    """Let all that the FSDP modules of the stages send go through watches."""
    dense = PerRankGradDots(groups.attn.dp_cp, replicates=zero == 0)
    experts = PerRankGradDots(groups.moe.edp, replicates=zero == 0)
    for stage in stages:
        for module in stage.modules():
            products = experts if isinstance(module, Experts) else dense
            if isinstance(module, FSDPModule):
                products.attach(module)
    return FSDPCommHooks(dense, experts)
