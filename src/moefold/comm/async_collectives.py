"""Exchanges that run while the rank computes something else, forward and backward.

An exchange is two nodes of the autograd graph: one begins it, the other waits for it. What is computed between the two
hides it. Backward the second node begins the exchange of the gradients and the first one waits, and because autograd
takes the later-made of two ready nodes first, the gradients of what was computed between hide that one too.

Where another micro-batch has a forward pass to be done (`comm/resumable.py`), it goes on between the two as well: a
forward pass pauses there, and a backward pass lets it go on before it waits.

A rank must begin and await its exchanges in the same order as the other members.
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
"""Begins an exchange of a tensor; returns what will hold the result, and what to wait for."""


@dataclass(frozen=True)
class WireFormat:
    """What rows are on their way, where not what they were before. Their gradients travel as they are."""

    pack: Callable[[Tensor], Tensor]
    """Makes what is sent of the rows; may copy them."""
    unpack: Callable[[Tensor], Tensor]
    """Makes rows of what arrives."""
    adjoint: Callable[[Tensor], Tensor] = lambda grad: grad
    """Makes the gradient of the rows of those of what was sent, which are as wide as the rows."""


IDENTITY = WireFormat(lambda rows: rows, lambda rows: rows)


@dataclass
class _AsyncCollective:
    """Both directions of one exchange, and what is under way of them."""

    group: Group
    forward: CollectiveLauncher
    backward: CollectiveLauncher
    wire_format: WireFormat
    pending: tuple[Tensor, dist.Work | None] | None = None

    def wait(self) -> Tensor:
        """What was exchanged, which is forgotten here."""
        assert self.pending is not None, "begun before it is awaited, and awaited once"
        buffer, work = self.pending
        self.pending = None
        if work is not None:
            with self.group.comm_timer.waiting():
                work.wait()
        return buffer


@dataclass(frozen=True)
class AsyncResult:
    """An exchange under way."""

    _dependency: Tensor
    _collective: _AsyncCollective | None
    _postprocess: Callable[[Tensor], Tensor] | None = None
    """What is to be done with what arrives."""

    def wait(self) -> Tensor:
        """The result; to be asked for once."""
        if self._collective is None:
            return self._dependency
        received: Tensor = _WaitCollective.apply(self._dependency, self._collective)
        return received if self._postprocess is None else self._postprocess(received)

    def wait_resumable(self) -> Resumable[Tensor]:
        """The result, after a pause; none in a group of one, where nothing is under way."""
        if self._collective is not None:
            yield
        return self.wait()


def async_all_to_all(
    x: Tensor,
    group: Group,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    wire_format: WireFormat = IDENTITY,
) -> AsyncResult:
    """Begin `collectives.all_to_all`; `x` must not change before the wait.

    Args:
        x: rows to send; with a form, the rows to make them of.
        group: the members.
        input_splits: of the rows that are sent, one count for each member.
        output_splits: one count for each member.
        wire_format: of the rows on their way; not used in a group of one.
    """
    sent = list(input_splits)
    received = list(output_splits)
    return _launch(
        x,
        group,
        lambda rows: begin_all_to_all(wire_format.pack(rows), group, sent, received),
        lambda grad: begin_all_to_all(grad, group, received, sent),
        wire_format,
    )


def async_all_gather(x: Tensor, group: Group, wire_format: WireFormat = IDENTITY) -> AsyncResult:
    """Begin `collectives.all_gather`; `x` must not change before the wait."""
    return _launch(
        x,
        group,
        lambda rows: begin_all_gather(wire_format.pack(rows), group),
        lambda grad: begin_reduce_scatter(grad, group),
        wire_format,
    )


def async_reduce_scatter(x: Tensor, group: Group) -> AsyncResult:
    """Begin `collectives.reduce_scatter`; `x` must not change before the wait."""
    return _launch(x, group, lambda rows: begin_reduce_scatter(rows, group), lambda grad: begin_all_gather(grad, group))


def async_all_gather_uneven(
    x: Tensor, group: Group, split_sizes: Sequence[int], wire_format: WireFormat = IDENTITY
) -> AsyncResult:
    """Begin `collectives.all_gather_rows`; `x` must not change before the wait."""
    # Not x itself: the graph has the form, and would keep it.
    num_rows = x.shape[0]
    repeats = (group.size, *[1] * (x.dim() - 1))
    to_all = WireFormat(
        lambda rows: wire_format.pack(rows).repeat(repeats),
        wire_format.unpack,
        lambda grad: wire_format.adjoint(grad.view(group.size, num_rows, *grad.shape[1:]).sum(0)),
    )
    return async_all_to_all(x, group, [num_rows] * group.size, split_sizes, to_all)


def async_reduce_scatter_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> AsyncResult:
    """Begin `collectives.reduce_scatter_rows`; `x` must not change before the wait."""
    if group.size == 1:
        return AsyncResult(x, None)
    mine = split_sizes[group.rank]
    in_flight = async_all_to_all(x, group, split_sizes, [mine] * group.size)
    return replace(in_flight, _postprocess=lambda parts: parts.view(group.size, mine, *parts.shape[1:]).sum(0))


def _launch(
    x: Tensor,
    group: Group,
    forward: CollectiveLauncher,
    backward: CollectiveLauncher,
    wire_format: WireFormat = IDENTITY,
) -> AsyncResult:
    if group.size == 1:
        return AsyncResult(x, None)
    exchange = _AsyncCollective(group, forward, backward, wire_format)
    return AsyncResult(_LaunchCollective.apply(x, exchange), exchange)


class _LaunchCollective(Function):
    """Gives an empty tensor, the ticket, which ties the two nodes together: the gradient has another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _AsyncCollective) -> Tensor:
        ctx.collective = collective
        collective.pending = collective.forward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
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
