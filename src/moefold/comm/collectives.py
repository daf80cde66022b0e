"""Differentiable collectives on local tensors (no-ops in a group of one rank), and ring communication.

Every gradient here is the exact adjoint under the convention that the loss of the world is the *sum* of the losses of
its ranks. The adjoint of all-gather is reduce-scatter (sum), and the other way round. No scale factors appear anywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.gloo_collectives import begin_gather, begin_sum_scatter, uses_gloo
from moefold.comm.groups import Group

T = TypeVar("T")
LinearMap = Callable[[Tensor], Tensor]

# torch 2.13 renamed the *_tensor collectives and warns about the old names. Torch 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BACKEND_NAMES = ("gloo", "NCCL")
"""Names that occur in the message of every failed collective, and so identify the error."""


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate the equal-shaped tensors of the members along dim 0, in group order. Adjoint: reduce_scatter."""
    return _differentiable(x, group, partial(_all_gather_now, group=group), partial(_reduce_scatter_now, group=group))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the members. Return this rank's part along dim 0, which group.size must divide. Adjoint: all_gather."""
    return _differentiable(x, group, partial(_reduce_scatter_now, group=group), partial(_all_gather_now, group=group))


def all_to_all(x: Tensor, group: Group, input_splits: Sequence[int], output_splits: Sequence[int]) -> Tensor:
    """Send input_splits[0] rows to member 0 and so on. Receive output_splits[i] rows from member i.

    Adjoint: the same with the splits swapped. Splits may be zero. Sender and receiver must agree on them.

    Args:
        x: rows to send, in the order of their destinations, [sum(input_splits), ...].
        input_splits: rows for each member.
        output_splits: rows from each member.

    Returns:
        The received rows in the order of their sources, [sum(output_splits), ...].
    """
    sent = list(input_splits)
    received = list(output_splits)
    return _differentiable(
        x,
        group,
        partial(_all_to_all_now, group=group, input_splits=sent, output_splits=received),
        partial(_all_to_all_now, group=group, input_splits=received, output_splits=sent),
    )


def all_gather_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> Tensor:
    """Concatenate tensors of different lengths: member i has split_sizes[i] rows. Adjoint: reduce_scatter_uneven."""
    gather = partial(_all_gather_uneven_now, group=group, split_sizes=list(split_sizes))
    return _differentiable(x, group, gather, partial(_reduce_scatter_uneven_now, **gather.keywords))


def reduce_scatter_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> Tensor:
    """Sum [sum(split_sizes), ...] over the members. Member i gets split_sizes[i] rows. Adjoint: all_gather_uneven."""
    scatter = partial(_reduce_scatter_uneven_now, group=group, split_sizes=list(split_sizes))
    return _differentiable(x, group, scatter, partial(_all_gather_uneven_now, **scatter.keywords))


def shard_dim_all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Split `split_dim` over the members and concatenate `concat_dim`, by all-to-all (Ulysses, arXiv:2309.14509).

    Args:
        x: local tensor. Its size along split_dim is a multiple of group.size.
        split_dim: the dim that becomes local.
        concat_dim: the dim that becomes full, in group order.
    """
    split_dim %= x.dim()
    concat_dim %= x.dim()
    return _differentiable(
        x,
        group,
        partial(_shard_dim_all_to_all_now, group=group, split_dim=split_dim, concat_dim=concat_dim),
        partial(_shard_dim_all_to_all_now, group=group, split_dim=concat_dim, concat_dim=split_dim),
    )


def differentiable_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the members. Each member gets the sum. Adjoint: the same, as each member's use of the sum counts."""
    reduce = partial(all_reduce_sum, group=group)
    return _differentiable(x, group, reduce, reduce)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum over the members without a gradient. `x` is unchanged."""
    total = x.detach().clone()
    if group.size > 1:
        all_reduce_sum_(total, group)
    return total


def all_reduce_sum_(x: Tensor, group: Group) -> None:
    """Replace `x` by the sum over the members, without a gradient or a copy."""
    group.record_collective("all_reduce", x)
    with group.comm_timer.waiting():
        dist.all_reduce(x, group=group.handle)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Return the element-wise maximum over the members without a gradient. `x` is unchanged."""
    maximum = x.detach().clone()
    if group.size > 1:
        group.record_collective("all_reduce", x)
        with group.comm_timer.waiting():
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.handle)
    return maximum


def all_gather_into(out: Tensor, x: Tensor, handle: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Concatenate the tensors of the members of a process group along dim 0 into `out`. It has no gradient."""
    if uses_gloo(handle, x.device):
        return _wait_unless(begin_gather(out, x, handle), async_op)
    return _all_gather(out, x, group=handle, async_op=async_op)


def reduce_scatter_into(
    out: Tensor, x: Tensor, handle: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Sum `x` over the members of a process group and write this rank's part to `out`. It has no gradient."""
    if uses_gloo(handle, x.device):
        return _wait_unless(begin_sum_scatter(out, x, handle), async_op)
    return _reduce_scatter(out, x, group=handle, async_op=async_op)


def _wait_unless(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def gather_to_first(x: Tensor, group: Group) -> Tensor | None:
    """Stack the members' tensors on member 0, [group.size, ...], without a gradient. Return None elsewhere."""
    x = x.detach().contiguous()
    if group.size == 1:
        return x.unsqueeze(0)
    group.record_collective("gather", x)
    if group.rank:
        dist.gather(x, None, group=group.handle, group_dst=0)
        return None
    out = x.new_empty((group.size, *x.shape))
    dist.gather(x, list(out.unbind(0)), group=group.handle, group_dst=0)
    return out


def broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """Return the tensor of member `source` on every member. On others `x` gives shape and dtype. It has no gradient."""
    x = x.detach().contiguous()
    if group.size > 1:
        group.record_collective("broadcast", x)
        dist.broadcast(x, group.ranks[source], group=group.handle)
    return x


def broadcast_object(value: T, group: Group, source: int) -> T:
    """Return the picklable object of member `source` on every member."""
    values = [value]
    if group.size > 1:
        group.recorder.record_collective("broadcast of an object", group.group_id, ())
        dist.broadcast_object_list(values, src=group.ranks[source], group=group.handle)
    return values[0]


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Return the picklable objects of all members, in group order, on every member."""
    if group.size == 1:
        return [value]
    values: list[T] = [value] * group.size
    group.recorder.record_collective("all_gather of objects", group.group_id, ())
    dist.all_gather_object(values, value, group=group.handle)
    return values


def isend(x: Tensor, group: Group, member: int) -> dist.Work | None:
    """Start sending a tensor, which must not change until the work is done, and return None if the tensor is empty."""
    return dist.isend(x, group.ranks[member], group=group.handle) if x.numel() else None


def recv(x: Tensor, group: Group, member: int) -> Tensor:
    """Receive a tensor from a member into `x`, blocking. An empty tensor is not sent."""
    if x.numel():
        dist.recv(x, group.ranks[member], group=group.handle)
    return x


def begin_all_gather(x: Tensor, group: Group, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Start to concatenate equal-shaped tensors along dim 0. With async_op, the result is valid once the work is done.

    No gradient, like all `begin_*` functions.
    """
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    group.record_collective("all_gather", x)
    return out, _all_gather(out, x.contiguous(), group=group.handle, async_op=async_op)


def begin_reduce_scatter(x: Tensor, group: Group, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Start to sum tensors. This rank gets its part of the sum along dim 0."""
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    group.record_collective("reduce_scatter", x)
    return out, _reduce_scatter(out, x.contiguous(), group=group.handle, async_op=async_op)


def begin_all_to_all(
    x: Tensor, group: Group, input_splits: list[int], output_splits: list[int], *, async_op: bool = True
) -> tuple[Tensor, dist.Work | None]:
    """Start an all-to-all of rows."""
    out = x.new_empty((sum(output_splits), *x.shape[1:]))
    splits = output_splits, input_splits
    group.record_collective("all_to_all", x)
    return out, dist.all_to_all_single(out, x.contiguous(), *splits, group=group.handle, async_op=async_op)


def _all_gather_now(x: Tensor, group: Group) -> Tensor:
    with group.comm_timer.waiting():
        return begin_all_gather(x, group, async_op=False)[0]


def _reduce_scatter_now(x: Tensor, group: Group) -> Tensor:
    with group.comm_timer.waiting():
        return begin_reduce_scatter(x, group, async_op=False)[0]


def _all_to_all_now(x: Tensor, group: Group, input_splits: list[int], output_splits: list[int]) -> Tensor:
    with group.comm_timer.waiting():
        return begin_all_to_all(x, group, input_splits, output_splits, async_op=False)[0]


def _all_gather_uneven_now(x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
    # An all-to-all where every member sends all its rows: exact lengths, no padding to the longest.
    repeated = x.repeat(group.size, *[1] * (x.dim() - 1))
    return _all_to_all_now(repeated, group, [x.shape[0]] * group.size, split_sizes)


def _reduce_scatter_uneven_now(x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
    num_rows = split_sizes[group.rank]
    shards = _all_to_all_now(x, group, split_sizes, [num_rows] * group.size)
    return shards.view(group.size, num_rows, *x.shape[1:]).sum(0)


def _shard_dim_all_to_all_now(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    send_chunks = torch.stack(x.chunk(group.size, split_dim))
    received = torch.empty_like(send_chunks)
    group.record_collective("all_to_all", send_chunks)
    with group.comm_timer.waiting():
        dist.all_to_all_single(received, send_chunks, group=group.handle)
    return torch.cat(received.unbind(0), concat_dim)


class _Collective(torch.autograd.Function):
    """Function of a tensor that computes a linear collective, and in the backward pass its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: LinearMap, adjoint: LinearMap) -> Tensor:
        ctx.adjoint = adjoint
        return collective(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grad), None, None


def _differentiable(x: Tensor, group: Group, collective: LinearMap, adjoint: LinearMap) -> Tensor:
    return x if group.size == 1 else _Collective.apply(x, collective, adjoint)


BLOCK_TAG = 0
SUM_TAG = 1
"""Message tags of blocks and of partial sums, which may be in flight at the same time."""


def ring_pass(block: Tensor, group: Group, buffers: Sequence[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, block) of each member, starting with this rank, then backwards round the ring.

    While the caller computes with one block, the next block is in flight.

    Args:
        block: this rank's block, contiguous, only read.
        group: the members, whose blocks have equal shapes.
        buffers: contiguous buffers for the blocks of the other members. This rank's block is not copied there. None: a
            block is valid until the iterator advances.
    """
    current = block
    spare = None
    for step in range(group.size - 1):
        source = (group.rank - step) % group.size
        if buffers is not None:
            incoming = buffers[source - 1]
        else:
            incoming = torch.empty_like(block) if spare is None else spare
        works = send_recv(current, incoming, group, BLOCK_TAG)
        yield source, current
        wait_all(works, group)
        current, spare = incoming, None if current is block else current
    yield (group.rank + 1) % group.size, current


def ring_reduce_scatter(partial_sum: Callable[[int], Tensor], group: Group) -> Tensor:
    """Reduce-scatter in a ring: sum over the members of their partial sums for this rank.

    While the caller computes a partial sum, the previous sum is in flight. Sums are rounded to the type of the partial
    sums at every member, and added in ring order, starting with the member after the destination.

    Args:
        partial_sum: computes this rank's partial sum for a member, overwritten here. All are contiguous, of one shape.
    """
    total = partial_sum((group.rank - 1) % group.size)
    for step in range(1, group.size):
        incoming = torch.empty_like(total)
        works = send_recv(total, incoming, group, SUM_TAG)
        own_sum = partial_sum((group.rank - 1 - step) % group.size)
        wait_all(works, group)
        total = own_sum.add_(incoming)
    return total


def send_recv(send: Tensor, receive: Tensor, group: Group, tag: int) -> list[dist.Work]:
    """Start sending to the next member and receiving from the previous member. Keep both tensors until `wait_all`."""
    if group.size == 1:
        receive.copy_(send)
        return []
    group.record_collective("ring exchange", send)
    after = group.ranks[(group.rank + 1) % group.size]
    before = group.ranks[(group.rank - 1) % group.size]
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, after, group.handle, tag),
            dist.P2POp(dist.irecv, receive, before, group.handle, tag),
        ]
    )


def wait_all(works: list[dist.Work], group: Group) -> None:
    """Wait for the sends and receives of `send_recv`."""
    with group.comm_timer.waiting():
        for work in works:
            work.wait()


def is_collective_error(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a failed collective: a symptom of the loss of another rank."""
    while error is not None:
        if isinstance(error, dist.DistError) or any(name in str(error) for name in BACKEND_NAMES):
            return True
        error = error.__cause__ or error.__context__
    return False
