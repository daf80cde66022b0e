"""Communication hooks of FSDP: time of waiting in its collectives, and dot products of gradients before reduction."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moefold.comm.collectives import all_gather_into, all_reduce_sum, all_to_all, reduce_scatter_into
from moefold.comm.comm_timer import CommTimer, Timestamp
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.private_torch import fsdp_param_group, fsdp_reduction_group, replace_fsdp_reduction
from moefold.comm.shared_memory import SharedExchange, open_shared_exchange
from moefold.model.moe.experts import Experts
from moefold.parallel.fsdp import fsdp_modules
from moefold.parallel.shared_gather import open_shared_gather


class PerRankGradDots:
    """Gram matrix <g_i, g_j> of the gradients that members i, j of a data-parallel group contribute to the reduction.

    In an all-to-all, which sends as many bytes as the reduction itself, member k gets the k-th part of every g_i. It
    adds the dot products of these parts to its matrix. The sum of the matrices of all members is exact. Nothing is sent
    unless `is_enabled`. On a checked step each member holds one more copy of the gradient of one FSDP module at a time.

    With ZeRO 2 and 3 the gradients of each micro-batch are reduced separately: the dot products are then summed over
    the micro-batches.

    With an exchange it reduces the gradients in memory that ranks share. Without, it is an FSDP custom reduce-scatter
    (`FSDPModule.set_custom_reduce_scatter`). Under ZeRO 0, where nothing is scattered, it reads the buffer that it
    allocated for FSDP, after the all-reduce.
    """

    def __init__(self, group: Group, *, replicates: bool, exchange: SharedExchange | None) -> None:
        self.is_enabled = False
        self.group = group
        self.exchange = exchange
        self._replicates = replicates
        self._buffers: list[Tensor] = []
        self._gram_matrix: Tensor | None = None
        self._all_reduce_start: Timestamp | None = None
        self._num_modules = 0

    def attach(self, module: FSDPModule) -> None:
        """Let this object reduce the module's gradients, with a timed all-gather."""
        if self.exchange is not None:
            group = fsdp_param_group(module)
            if group is not None:
                members = fsdp_reduction_group(group, replicates=self._replicates)
                assert self.exchange.has_members_of(members), "FSDP reduces among the members of the exchange"
                replace_fsdp_reduction(group, partial(self._reduce_by_exchange, self._num_modules))
                self._num_modules += 1
            if self._replicates:
                return
        module.set_custom_all_gather(TimedAllGather(self.group.comm_timer, self.exchange))  # type: ignore[arg-type]  # as below
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # the class to inherit from is private
        if self._replicates:
            module.set_all_reduce_hook(self._after_all_reduce)

    def pop(self, device: torch.device) -> Tensor:
        """Return this rank's summand of the Gram matrix since the last call, float64 [size, size]. Disable the hook."""
        size = self.group.size
        matrix = (
            torch.zeros(size, size, dtype=torch.float64, device=device)
            if self._gram_matrix is None
            else self._gram_matrix
        )
        self.is_enabled = False
        self._gram_matrix = None
        return matrix

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of a reduction. FSDP allocates the input first, then the output."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._replicates:
            self._buffers.append(buffer)
            if len(self._buffers) == 2:
                # The output is allocated right before it is all-reduced.
                self._all_reduce_start = self.group.comm_timer.enter(is_waiting=True)
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter as FSDP's default does."""
        assert op == dist.ReduceOp.SUM, op
        if self.is_enabled and not self._replicates:
            self._accumulate_dots(input_tensor)
        with self.group.comm_timer.waiting():
            return reduce_scatter_into(output_tensor, input_tensor, group, async_op=async_op)

    @torch.no_grad()
    def _reduce_by_exchange(
        self, module: int, grads: list[Tensor], dtype: torch.dtype, numbers: list[int]
    ) -> list[Tensor]:
        """Sum gradients in memory that ranks share: to this rank's rows of them, or whole where ranks replicate.

        Args:
            module: number of the module, in the order of `attach`.
            numbers: numbers of the gradients' parameters in the module.
        """
        assert self.exchange is not None
        if self.is_enabled:
            self._accumulate_dots(torch.cat([grad.reshape(-1).to(dtype) for grad in grads]))
        with self.group.comm_timer.waiting():
            reduce = self.exchange.sum if self._replicates else self.exchange.sum_scatter
            return reduce(grads, dtype, (module, *numbers))

    def _after_all_reduce(self, output: Tensor) -> None:
        self.group.comm_timer.leave(self._all_reduce_start)
        if self.is_enabled:
            buffer = self._buffers[0]
            if buffer.is_cuda:
                # FSDP frees it after the reduce-scatter, before the all-reduce stream has read it. Without
                # record_stream, the allocating stream could overwrite it with other gradients.
                buffer.record_stream(torch.cuda.current_stream())
            self._accumulate_dots(buffer)
        self._buffers.clear()

    @torch.no_grad()
    def _accumulate_dots(self, gradient: Tensor) -> None:
        size = self.group.size
        if size == 1:
            return
        padded = nn.functional.pad(gradient, (0, -gradient.numel() % size)).view(size, -1)
        shards = all_to_all(padded, self.group, [1] * size, [1] * size).double()
        dots = shards @ shards.T
        self._gram_matrix = dots if self._gram_matrix is None else self._gram_matrix + dots


class TimedAllGather:
    """FSDP custom all-gather that counts its time as communication."""

    def __init__(self, comm_timer: CommTimer, exchange: SharedExchange | None) -> None:
        self._comm_timer = comm_timer
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather along dim 0 (all-gather)."""
        with self._comm_timer.waiting():
            if self._exchange is not None:
                assert self._exchange.has_members_of(group), "FSDP gathers among the members of the exchange"
                self._exchange.gather_into(output_tensor, input_tensor)
                return None
            return all_gather_into(output_tensor, input_tensor, group, async_op=async_op)


@dataclass(frozen=True)
class FSDPCommHooks:
    """The communication hooks of dense and expert parameters."""

    dense: PerRankGradDots
    experts: PerRankGradDots
    gathered: Sequence[Tensor]
    """Gathered parameters in memory that ranks share."""

    def shared_memory(self) -> list[Tensor]:
        """Return the memory of exchanges, which no formula of memory counts."""
        exchanges = self.dense.exchange, self.experts.exchange
        return [exchange.memory for exchange in exchanges if exchange is not None]

    def enable(self) -> None:
        """Collect the dot products of the gradients of the next backward passes."""
        self.dense.is_enabled = self.experts.is_enabled = True

    def are_local_grads_finite(self, device: torch.device) -> bool:
        """Return whether this rank's gradients were finite before reduction. It is collective."""
        squares = [
            all_reduce_sum(dots.pop(device).diagonal(), dots.group)[dots.group.rank]
            for dots in (self.dense, self.experts)
        ]
        return bool(torch.stack(squares).isfinite().all())


def install_comm_hooks(stages: Sequence[nn.Module], groups: ParallelGroups, zero: int) -> FSDPCommHooks:
    """Install the communication hooks on all FSDP modules of the stages. It is collective."""
    dense, experts = (
        PerRankGradDots(
            group,
            replicates=zero == 0,
            exchange=open_shared_exchange(group, groups.device),
        )
        for group in (groups.attn.dp_cp, groups.moe.edp)
    )
    gathered: list[Tensor] = []
    for dots, modules in zip((dense, experts), _modules_by_group(stages), strict=True):
        for module in modules:
            dots.attach(module)
        if dots.exchange is not None and 0 < zero < 3:
            gathered += open_shared_gather(modules, dots.exchange)
    return FSDPCommHooks(dense, experts, gathered)


def _modules_by_group(stages: Sequence[nn.Module]) -> tuple[list[FSDPModule], list[FSDPModule]]:
    """Return the FSDP modules of dense parameters and of experts."""
    modules = [module for stage in stages for module in fsdp_modules(stage)]
    experts: list[FSDPModule] = [module for module in modules if isinstance(module, Experts)]
    return [module for module in modules if not isinstance(module, Experts)], experts
