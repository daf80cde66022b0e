"""Collectives on local tensors, with gradients. A group of one rank costs nothing.

Every gradient here is the exact adjoint under the convention that the loss of the world is the *sum* of the losses of
its ranks: the adjoint of all-gather is reduce-scatter (sum), and the other way round. No scale factors appear anywhere.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.parallel.groups import Group

T = TypeVar("T")

# torch 2.13 renamed the *_tensor collectives and warns about the old names, which 2.11 alone has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate the equal-shaped tensors of the members along dim 0, in group order. Adjoint: reduce_scatter."""
    return x if group.size == 1 else _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum the tensors of the members and keep my part along dim 0, which group.size divides. Adjoint: all_gather."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def all_to_all(x: Tensor, group: Group, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Tensor:
    """Send the first send_rows[0] rows to member 0 and so on; receive receive_rows[i] rows from member i.

    Adjoint: the same with the counts exchanged. Counts may be zero; both ends must agree on them.

    Args:
        x: rows to send, in the order of their destinations, [sum(send_rows), ...].
        group: the members.
        send_rows: one count for each member.
        receive_rows: one count for each member.

    Returns:
        The received rows in the order of their sources, [sum(receive_rows), ...].
    """
    if group.size == 1:
        return x
    return _AllToAll.apply(x, group, list(send_rows), list(receive_rows))


def all_gather_rows(x: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """Concatenate tensors of different lengths: member i brings rows[i] rows. Adjoint: reduce_scatter_rows."""
    return x if group.size == 1 else _AllGatherRows.apply(x, group, list(rows))


def reduce_scatter_rows(x: Tensor, group: Group, rows: Sequence[int]) -> Tensor:
    """Sum [sum(rows), ...] over the members; member i keeps its rows[i] rows. Adjoint: all_gather_rows."""
    return x if group.size == 1 else _ReduceScatterRows.apply(x, group, list(rows))


def swap_dims(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all that cuts `split_dim` over the members and concatenates `concat_dim` (Ulysses, arXiv:2309.14509).

    Args:
        x: local tensor; group.size divides its size along split_dim.
        group: the members.
        split_dim: the dim that becomes local.
        concat_dim: the dim that becomes whole, in group order.
    """
    if group.size == 1:
        return x
    return _SwapDims.apply(x, group, split_dim % x.dim(), concat_dim % x.dim())


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum over the members, on each of them. Adjoint: the same, as each member's use of the sum counts."""
    return x if group.size == 1 else _SumOver.apply(x, group)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """The sum over the members, without a gradient; `x` is left as it is."""
    total = x.detach().clone()
    if group.size > 1:
        add_up(total, group)
    return total


def add_up(x: Tensor, group: Group) -> None:
    """Replace `x` by the sum over the members; without a gradient, and without a copy."""
    group.note("all_reduce", x)
    with group.clock.waiting():
        dist.all_reduce(x, group=group.handle)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """The maximum over the members, without a gradient; `x` is left as it is."""
    top = x.detach().clone()
    if group.size > 1:
        group.note("all_reduce", x)
        with group.clock.waiting():
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group.handle)
    return top


def all_gather_into(
    out: Tensor, x: Tensor, handle: dist.ProcessGroup, *, asynchronous: bool = False
) -> dist.Work | None:
    """Concatenate what the members of a process group have along dim 0 into `out`. No gradient."""
    return _all_gather(out, x, group=handle, async_op=asynchronous)


def reduce_scatter_into(
    out: Tensor, x: Tensor, handle: dist.ProcessGroup, op: Any, *, asynchronous: bool = False
) -> dist.Work | None:
    """Reduce `x` over the members of a process group and write my part of it into `out`. No gradient."""
    return _reduce_scatter(out, x, op=op, group=handle, async_op=asynchronous)


def gather_to_first(x: Tensor, group: Group) -> Tensor | None:
    """Stack the equal-shaped tensors of the members on member 0, [group.size, ...]; None elsewhere. No gradient."""
    x = x.detach().contiguous()
    if group.size == 1:
        return x.unsqueeze(0)
    group.note("gather", x)
    if group.rank:
        dist.gather(x, None, group=group.handle, group_dst=0)
        return None
    out = x.new_empty((group.size, *x.shape))
    dist.gather(x, list(out.unbind(0)), group=group.handle, group_dst=0)
    return out


def broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """The tensor of member `source` on every member; `x` says shape and type elsewhere. No gradient."""
    x = x.detach().contiguous()
    if group.size > 1:
        group.note("broadcast", x)
        dist.broadcast(x, group.ranks[source], group=group.handle)
    return x


def broadcast_object(value: T, group: Group, source: int) -> T:
    """What member `source` gives, on every member; anything that can be pickled."""
    held = [value]
    if group.size > 1:
        group.record.begin("broadcast of an object", group.number, ())
        dist.broadcast_object_list(held, src=group.ranks[source], group=group.handle)
    return held[0]


def start_send(x: Tensor, group: Group, member: int) -> dist.Work | None:
    """Begin to send a tensor to a member; leave it alone until the work is done. None where there is nothing in it."""
    return dist.isend(x, group.ranks[member], group=group.handle) if x.numel() else None


def receive(x: Tensor, group: Group, member: int) -> Tensor:
    """Fill a tensor with what a member sends; waits for it. Without elements nothing is sent."""
    if x.numel():
        dist.recv(x, group.ranks[member], group=group.handle)
    return x


def begin_all_gather(x: Tensor, group: Group, *, asynchronous: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Concatenate equal-shaped tensors along dim 0; if asynchronous, the result is there once the work is done.

    Like the other `begin_*` without a gradient.
    """
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    group.note("all_gather", x)
    return out, _all_gather(out, x.contiguous(), group=group.handle, async_op=asynchronous)


def begin_reduce(x: Tensor, group: Group, *, asynchronous: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Sum tensors, of which I keep my part along dim 0."""
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.note("reduce_scatter", x)
    return out, _reduce_scatter(out, x.contiguous(), group=group.handle, async_op=asynchronous)


def begin_exchange(
    x: Tensor, group: Group, send_rows: list[int], receive_rows: list[int], *, asynchronous: bool = True
) -> tuple[Tensor, dist.Work | None]:
    """All-to-all of rows."""
    out = x.new_empty((sum(receive_rows), *x.shape[1:]))
    counts = receive_rows, send_rows
    group.note("all_to_all", x)
    return out, dist.all_to_all_single(out, x.contiguous(), *counts, group=group.handle, async_op=asynchronous)


def _gather(x: Tensor, group: Group) -> Tensor:
    with group.clock.waiting():
        return begin_all_gather(x, group, asynchronous=False)[0]


def _reduce(x: Tensor, group: Group) -> Tensor:
    with group.clock.waiting():
        return begin_reduce(x, group, asynchronous=False)[0]


def _exchange(x: Tensor, group: Group, send_rows: list[int], receive_rows: list[int]) -> Tensor:
    with group.clock.waiting():
        return begin_exchange(x, group, send_rows, receive_rows, asynchronous=False)[0]


def _gather_rows(x: Tensor, group: Group, rows: list[int]) -> Tensor:
    # An all-to-all in which everybody sends all it has: exact lengths, no padding to the longest.
    sent = x.repeat(group.size, *[1] * (x.dim() - 1))
    return _exchange(sent, group, [x.shape[0]] * group.size, rows)


def _reduce_rows(x: Tensor, group: Group, rows: list[int]) -> Tensor:
    mine = rows[group.rank]
    parts = _exchange(x, group, rows, [mine] * group.size)
    return parts.view(group.size, mine, *x.shape[1:]).sum(0)


def _swap(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size, split_dim))
    received = torch.empty_like(sent)
    group.note("all_to_all", sent)
    with group.clock.waiting():
        dist.all_to_all_single(received, sent, group=group.handle)
    return torch.cat(received.unbind(0), concat_dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send_rows: list[int], receive_rows: list[int]) -> Tensor:
        ctx.args = group, send_rows, receive_rows
        return _exchange(x, group, send_rows, receive_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, send_rows, receive_rows = ctx.args
        return _exchange(grad, group, receive_rows, send_rows), None, None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: list[int]) -> Tensor:
        ctx.args = group, rows
        return _gather_rows(x, group, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_rows(grad.contiguous(), *ctx.args), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: list[int]) -> Tensor:
        ctx.args = group, rows
        return _reduce_rows(x, group, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_rows(grad.contiguous(), *ctx.args), None, None


class _SwapDims(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
        ctx.args = group, concat_dim, split_dim
        return _swap(x, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grad, *ctx.args), None, None, None
