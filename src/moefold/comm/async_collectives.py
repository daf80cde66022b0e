"""Asynchronous collectives that overlap with computation, in the forward and the backward pass.

A collective is two nodes of the autograd graph: a launch node and a wait node. The computation between the two hides
the collective. In the backward pass the wait node launches the collective of the gradients, and the launch node waits
for it. If two nodes are ready, autograd runs the node that was created later, so the backward pass of the computation
in between hides that collective too.

The forward pass of another micro-batch (`comm/resumable.py`) may run in between as well: it yields at each collective,
and a backward pass resumes it before waiting.

A rank must launch and await its collectives in the same order as the other members.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moefold.comm.collectives import begin_all_gather, begin_all_to_all, begin_reduce_scatter
from moefold.comm.groups import Group
from moefold.comm.resumable import Resumable

CollectiveLauncher = Callable[[Tensor], tuple[Tensor, dist.Work | None]]
"""Launches a collective on a tensor, and returns the output buffer and the work to wait for."""


@dataclass(frozen=True)
class WireFormat:
    """Encoding of rows for communication, such as FP8. Gradients are sent unencoded."""

    pack: Callable[[Tensor], Tensor]
    """Encodes the rows to send. It may copy them."""
    unpack: Callable[[Tensor], Tensor]
    """Decodes the received rows."""
    adjoint: Callable[[Tensor], Tensor] = lambda grad: grad
    """Computes the gradient of the rows from the gradient of the sent rows, which are as wide as the rows."""


IDENTITY = WireFormat(lambda rows: rows, lambda rows: rows)


@dataclass
class _AsyncCollective:
    """A collective and its adjoint, and the pending result of whichever runs."""

    group: Group
    forward: CollectiveLauncher
    backward: CollectiveLauncher
    wire_format: WireFormat
    resumes_forward: bool
    """True if an overlapped forward pass is resumed while the backward pass waits."""
    pending: tuple[Tensor, dist.Work | None] | None = None

    def wait(self) -> Tensor:
        """Wait for the pending collective and return its output, dropping the reference to it."""
        assert self.pending is not None, "launched before the wait, and awaited once"
        buffer, work = self.pending
        self.pending = None
        if work is not None:
            with self.group.comm_timer.waiting():
                work.wait()
        return buffer


@dataclass(frozen=True)
class AsyncResult:
    """Handle of a collective in flight."""

    _dependency: Tensor
    _collective: _AsyncCollective | None
    _postprocess: Callable[[Tensor], Tensor] | None = None
    """Applied to the received tensor."""

    def wait(self) -> Tensor:
        """Wait for the result, which a caller takes once."""
        if self._collective is None:
            return self._dependency
        received: Tensor = _WaitCollective.apply(self._dependency, self._collective)
        return received if self._postprocess is None else self._postprocess(received)

    def wait_resumable(self) -> Resumable[Tensor]:
        """Yield once while the collective is in flight, unless the group has one rank, then wait for the result."""
        if self._collective is not None:
            yield
        return self.wait()


def async_all_to_all(
    x: Tensor,
    group: Group,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    wire_format: WireFormat = IDENTITY,
    *,
    resumes_forward: bool = True,
) -> AsyncResult:
    """Launch `collectives.all_to_all`. `x` must not change before the wait.

    Args:
        x: rows to send, before encoding by `wire_format`.
        input_splits: encoded rows for each member.
        output_splits: encoded rows from each member.
        wire_format: encoding of the rows. A group of one rank does not use it.
        resumes_forward: False: the backward pass does not resume an overlapped forward pass while it waits, because
            another collective in flight at the same time does so.
    """
    send_counts = list(input_splits)
    received = list(output_splits)
    return _launch(
        x,
        group,
        lambda rows: begin_all_to_all(wire_format.pack(rows), group, send_counts, received),
        lambda grad: begin_all_to_all(grad, group, received, send_counts),
        wire_format,
        resumes_forward=resumes_forward,
    )


def async_all_gather(x: Tensor, group: Group, wire_format: WireFormat = IDENTITY) -> AsyncResult:
    """Launch `collectives.all_gather`. `x` must not change before the wait."""
    return _launch(
        x,
        group,
        lambda rows: begin_all_gather(wire_format.pack(rows), group),
        lambda grad: begin_reduce_scatter(grad, group),
        wire_format,
    )


def async_reduce_scatter(x: Tensor, group: Group) -> AsyncResult:
    """Launch `collectives.reduce_scatter`. `x` must not change before the wait."""
    return _launch(x, group, lambda rows: begin_reduce_scatter(rows, group), lambda grad: begin_all_gather(grad, group))


def async_all_gather_uneven(
    x: Tensor, group: Group, split_sizes: Sequence[int], wire_format: WireFormat = IDENTITY
) -> AsyncResult:
    """Launch `collectives.all_gather_uneven`. `x` must not change before the wait."""
    # Do not capture x itself: the autograd graph holds the wire format and would keep x alive.
    num_rows = x.shape[0]
    repeats = (group.size, *[1] * (x.dim() - 1))
    to_all = WireFormat(
        lambda rows: wire_format.pack(rows).repeat(repeats),
        wire_format.unpack,
        lambda grad: wire_format.adjoint(grad.view(group.size, num_rows, *grad.shape[1:]).sum(0)),
    )
    return async_all_to_all(x, group, [num_rows] * group.size, split_sizes, to_all)


def async_reduce_scatter_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> AsyncResult:
    """Launch `collectives.reduce_scatter_uneven`. `x` must not change before the wait."""
    if group.size == 1:
        return AsyncResult(x, None)
    num_rows = split_sizes[group.rank]
    result = async_all_to_all(x, group, split_sizes, [num_rows] * group.size)
    return replace(result, _postprocess=lambda shards: shards.view(group.size, num_rows, *shards.shape[1:]).sum(0))


def _launch(
    x: Tensor,
    group: Group,
    forward: CollectiveLauncher,
    backward: CollectiveLauncher,
    wire_format: WireFormat = IDENTITY,
    *,
    resumes_forward: bool = True,
) -> AsyncResult:
    if group.size == 1:
        return AsyncResult(x, None)
    collective = _AsyncCollective(group, forward, backward, wire_format, resumes_forward)
    return AsyncResult(_LaunchCollective.apply(x, collective), collective)


class _LaunchCollective(Function):
    """Launch node: returns an empty tensor that links it to the wait node, as the gradients have different shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _AsyncCollective) -> Tensor:
        ctx.collective = collective
        collective.pending = collective.forward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.collective.resumes_forward:
            ctx.collective.group.backward_overlap.resume()
        return ctx.collective.wire_format.adjoint(ctx.collective.wait()), None


class _WaitCollective(Function):
    @staticmethod
    def forward(ctx: Any, dependency: Tensor, collective: _AsyncCollective) -> Tensor:
        ctx.collective = collective
        return collective.wire_format.unpack(collective.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.collective.pending = ctx.collective.backward(grad)
        return grad.new_empty(0), None
