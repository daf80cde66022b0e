"""Exchanges that run while the rank computes something else, forward and backward.

An exchange is two nodes of the autograd graph: one begins it, the other waits for it. What is computed between the two
hides it. Backward the second node begins the exchange of the gradients and the first one waits, and because autograd
takes the later-made of two ready nodes first, the gradients of what was computed between hide that one too.

Where another micro-batch has a forward pass to be done (`parallel/beside.py`), it goes on between the two as well: a
forward pass pauses there, and a backward pass lets it go on before it waits.

A rank must begin and await its exchanges in the same order as the other members.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moefold.model.steps import Steps
from moefold.parallel.collectives import begin_all_gather, begin_exchange, begin_reduce
from moefold.parallel.groups import Group

Begin = Callable[[Tensor], tuple[Tensor, dist.Work | None]]
"""Begins an exchange of a tensor; returns what will hold the result, and what to wait for."""


@dataclass(frozen=True)
class Form:
    """What rows are on their way, where not what they were before. Their gradients travel as they are."""

    pack: Callable[[Tensor], Tensor]
    """Makes what is sent of the rows; may copy them."""
    unpack: Callable[[Tensor], Tensor]
    """Makes rows of what arrives."""
    adjoint: Callable[[Tensor], Tensor] = lambda grad: grad
    """Makes the gradient of the rows of those of what was sent, which are as wide as the rows."""


AS_IT_IS = Form(lambda rows: rows, lambda rows: rows)


@dataclass
class _Exchange:
    """Both directions of one exchange, and what is under way of them."""

    group: Group
    forward: Begin
    backward: Begin
    form: Form
    under_way: tuple[Tensor, dist.Work | None] | None = None

    def wait(self) -> Tensor:
        """What was exchanged, which is forgotten here."""
        assert self.under_way is not None, "begun before it is awaited, and awaited once"
        buffer, work = self.under_way
        self.under_way = None
        if work is not None:
            with self.group.clock.waiting():
                work.wait()
        return buffer


@dataclass(frozen=True)
class InFlight:
    """An exchange under way."""

    _ticket: Tensor
    _exchange: _Exchange | None
    _finish: Callable[[Tensor], Tensor] | None = None
    """What is to be done with what arrives."""

    def wait(self) -> Tensor:
        """The result; to be asked for once."""
        if self._exchange is None:
            return self._ticket
        received: Tensor = _Await.apply(self._ticket, self._exchange)
        return received if self._finish is None else self._finish(received)

    def landing(self) -> Steps[Tensor]:
        """The result, after a pause; none in a group of one, where nothing is under way."""
        if self._exchange is not None:
            yield
        return self.wait()


def start_all_to_all(
    x: Tensor, group: Group, send_rows: Sequence[int], receive_rows: Sequence[int], form: Form = AS_IT_IS
) -> InFlight:
    """Begin `collectives.all_to_all`; `x` must not change before the wait.

    Args:
        x: rows to send; with a form, the rows to make them of.
        group: the members.
        send_rows: of the rows that are sent, one count for each member.
        receive_rows: one count for each member.
        form: of the rows on their way; not used in a group of one.
    """
    sent, received = list(send_rows), list(receive_rows)
    return _start(
        x,
        group,
        lambda rows: begin_exchange(form.pack(rows), group, sent, received),
        lambda grad: begin_exchange(grad, group, received, sent),
        form,
    )


def start_all_gather(x: Tensor, group: Group, form: Form = AS_IT_IS) -> InFlight:
    """Begin `collectives.all_gather`; `x` must not change before the wait."""
    return _start(
        x,
        group,
        lambda rows: begin_all_gather(form.pack(rows), group),
        lambda grad: begin_reduce(grad, group),
        form,
    )


def start_reduce_scatter(x: Tensor, group: Group) -> InFlight:
    """Begin `collectives.reduce_scatter`; `x` must not change before the wait."""
    return _start(x, group, lambda rows: begin_reduce(rows, group), lambda grad: begin_all_gather(grad, group))


def start_all_gather_rows(x: Tensor, group: Group, rows: Sequence[int], form: Form = AS_IT_IS) -> InFlight:
    """Begin `collectives.all_gather_rows`; `x` must not change before the wait."""
    # Not x itself: the graph has the form, and would keep it.
    num_rows, repeats = x.shape[0], (group.size, *[1] * (x.dim() - 1))
    to_all = Form(
        lambda rows: form.pack(rows).repeat(repeats),
        form.unpack,
        lambda grad: form.adjoint(grad.view(group.size, num_rows, *grad.shape[1:]).sum(0)),
    )
    return start_all_to_all(x, group, [num_rows] * group.size, rows, to_all)


def start_reduce_scatter_rows(x: Tensor, group: Group, rows: Sequence[int]) -> InFlight:
    """Begin `collectives.reduce_scatter_rows`; `x` must not change before the wait."""
    if group.size == 1:
        return InFlight(x, None)
    mine = rows[group.rank]
    in_flight = start_all_to_all(x, group, rows, [mine] * group.size)
    return replace(in_flight, _finish=lambda parts: parts.view(group.size, mine, *parts.shape[1:]).sum(0))


def _start(x: Tensor, group: Group, forward: Begin, backward: Begin, form: Form = AS_IT_IS) -> InFlight:
    if group.size == 1:
        return InFlight(x, None)
    exchange = _Exchange(group, forward, backward, form)
    return InFlight(_Begin.apply(x, exchange), exchange)


class _Begin(Function):
    """Gives an empty tensor, the ticket, which ties the two nodes together: the gradient has another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.under_way = exchange.forward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.group.beside.go_on()
        return ctx.exchange.form.adjoint(ctx.exchange.wait()), None


class _Await(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.form.unpack(exchange.wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.under_way = ctx.exchange.backward(grad)
        return grad.new_empty(0), None
