"""Differentiable collectives on local tensors (no-ops in a group of one rank), and ring communication.

Every gradient here is the exact adjoint under the convention that the loss of the world is the *sum* of the losses of
its ranks: the adjoint of all-gather is reduce-scatter (sum), and the other way round. No scale factors appear anywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.gloo_collectives import begin_gather, begin_sum_scatter, uses_gloo
from moefold.comm.groups import Group

T = TypeVar("T")

# torch 2.13 renamed the *_tensor collectives and warns about the old names; torch 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BACKEND_NAMES = ("gloo", "NCCL")
"""Names that occur in the message of every failed collective, and so identify the error."""


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate the equal-shaped tensors of the members along dim 0, in group order. Adjoint: reduce_scatter."""
    return x if group.size == 1 else _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the members; return this rank's part along dim 0, which group.size must divide. Adjoint: all_gather."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


def all_to_all(x: Tensor, group: Group, input_splits: Sequence[int], output_splits: Sequence[int]) -> Tensor:
    """Send input_splits[0] rows to member 0 and so on; receive output_splits[i] rows from member i.

    Adjoint: the same with the splits swapped. Splits may be zero; sender and receiver must agree on them.

    Args:
        x: rows to send, in the order of their destinations, [sum(input_splits), ...].
        group: the members.
        input_splits: rows for each member.
        output_splits: rows from each member.

    Returns:
        The received rows in the order of their sources, [sum(output_splits), ...].
    """
    if group.size == 1:
        return x
    return _AllToAll.apply(x, group, list(input_splits), list(output_splits))


def all_gather_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> Tensor:
    """Concatenate tensors of different lengths: member i has split_sizes[i] rows. Adjoint: reduce_scatter_uneven."""
    return x if group.size == 1 else _AllGatherUneven.apply(x, group, list(split_sizes))


def reduce_scatter_uneven(x: Tensor, group: Group, split_sizes: Sequence[int]) -> Tensor:
    """Sum [sum(split_sizes), ...] over the members; member i gets split_sizes[i] rows. Adjoint: all_gather_uneven."""
    return x if group.size == 1 else _ReduceScatterUneven.apply(x, group, list(split_sizes))


def shard_dim_all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Split `split_dim` over the members and concatenate `concat_dim`, by all-to-all (Ulysses, arXiv:2309.14509).

    Args:
        x: local tensor; group.size divides its size along split_dim.
        group: the members.
        split_dim: the dim that becomes local.
        concat_dim: the dim that becomes full, in group order.
    """
    if group.size == 1:
        return x
    return _ShardDimAllToAll.apply(x, group, split_dim % x.dim(), concat_dim % x.dim())


def differentiable_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the members; each member gets the sum. Adjoint: the same, as each member's use of the sum counts."""
    return x if group.size == 1 else _AllReduce.apply(x, group)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum over the members without a gradient; `x` is unchanged."""
    total = x.detach().clone()
    if group.size > 1:
        all_reduce_sum_(total, group)
    return total


def all_reduce_sum_(x: Tensor, group: Group) -> None:
    """Replace `x` by the sum over the members; no gradient, no copy."""
    group.record_collective("all_reduce", x)
    with group.comm_timer.waiting():
        dist.all_reduce(x, group=group.handle)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Return the element-wise maximum over the members without a gradient; `x` is unchanged."""
    maximum = x.detach().clone()
    if group.size > 1:
        group.record_collective("all_reduce", x)
        with group.comm_timer.waiting():
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group.handle)
    return maximum


def all_gather_into(out: Tensor, x: Tensor, handle: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Concatenate the tensors of the members of a process group along dim 0 into `out`. No gradient."""
    if uses_gloo(handle, x.device):
        return _wait_unless(begin_gather(out, x, handle), async_op)
    return _all_gather(out, x, group=handle, async_op=async_op)


def reduce_scatter_into(
    out: Tensor, x: Tensor, handle: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Sum `x` over the members of a process group and write this rank's part to `out`. No gradient."""
    if uses_gloo(handle, x.device):
        return _wait_unless(begin_sum_scatter(out, x, handle), async_op)
    return _reduce_scatter(out, x, group=handle, async_op=async_op)


def _wait_unless(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def gather_to_first(x: Tensor, group: Group) -> Tensor | None:
    """Stack the equal-shaped tensors of the members on member 0, [group.size, ...]; None elsewhere. No gradient."""
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
    """Return the tensor of member `source` on every member; on others `x` gives shape and dtype. No gradient."""
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
    """Start sending a tensor, which must not change until the work is done; return None if the tensor is empty."""
    return dist.isend(x, group.ranks[member], group=group.handle) if x.numel() else None


def recv(x: Tensor, group: Group, member: int) -> Tensor:
    """Receive a tensor from a member into `x`, blocking; an empty tensor is not sent."""
    if x.numel():
        dist.recv(x, group.ranks[member], group=group.handle)
    return x


def begin_all_gather(x: Tensor, group: Group, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Start to concatenate equal-shaped tensors along dim 0; with async_op, the result is valid once the work is done.

    No gradient, like all `begin_*` functions.
    """
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    group.record_collective("all_gather", x)
    return out, _all_gather(out, x.contiguous(), group=group.handle, async_op=async_op)


def begin_reduce_scatter(x: Tensor, group: Group, *, async_op: bool = True) -> tuple[Tensor, dist.Work | None]:
    """Start to sum tensors; this rank gets its part of the sum along dim 0."""
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


def _sync_all_gather(x: Tensor, group: Group) -> Tensor:
    with group.comm_timer.waiting():
        return begin_all_gather(x, group, async_op=False)[0]


def _sync_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    with group.comm_timer.waiting():
        return begin_reduce_scatter(x, group, async_op=False)[0]


def _sync_all_to_all(x: Tensor, group: Group, input_splits: list[int], output_splits: list[int]) -> Tensor:
    with group.comm_timer.waiting():
        return begin_all_to_all(x, group, input_splits, output_splits, async_op=False)[0]


def _sync_all_gather_uneven(x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
    # An all-to-all where every member sends all its rows: exact lengths, no padding to the longest.
    repeated = x.repeat(group.size, *[1] * (x.dim() - 1))
    return _sync_all_to_all(repeated, group, [x.shape[0]] * group.size, split_sizes)


def _sync_reduce_scatter_uneven(x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
    num_rows = split_sizes[group.rank]
    shards = _sync_all_to_all(x, group, split_sizes, [num_rows] * group.size)
    return shards.view(group.size, num_rows, *x.shape[1:]).sum(0)


def _sync_shard_dim_all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    send_chunks = torch.stack(x.chunk(group.size, split_dim))
    received = torch.empty_like(send_chunks)
    group.record_collective("all_to_all", send_chunks)
    with group.comm_timer.waiting():
        dist.all_to_all_single(received, send_chunks, group=group.handle)
    return torch.cat(received.unbind(0), concat_dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sync_all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sync_reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sync_reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sync_all_gather(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, input_splits: list[int], output_splits: list[int]) -> Tensor:
        ctx.args = group, input_splits, output_splits
        return _sync_all_to_all(x, group, input_splits, output_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, input_splits, output_splits = ctx.args
        return _sync_all_to_all(grad, group, output_splits, input_splits), None, None, None


class _AllGatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
        ctx.args = group, split_sizes
        return _sync_all_gather_uneven(x, group, split_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sync_reduce_scatter_uneven(grad.contiguous(), *ctx.args), None, None


class _ReduceScatterUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_sizes: list[int]) -> Tensor:
        ctx.args = group, split_sizes
        return _sync_reduce_scatter_uneven(x, group, split_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sync_all_gather_uneven(grad.contiguous(), *ctx.args), None, None


class _ShardDimAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
        ctx.args = group, concat_dim, split_dim
        return _sync_shard_dim_all_to_all(x, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sync_shard_dim_all_to_all(grad, *ctx.args), None, None, None


BLOCK_TAG = 0
SUM_TAG = 1
"""Message tags of blocks and of partial sums, which may be in flight at the same time."""


def ring_pass(block: Tensor, group: Group, buffers: Sequence[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, block) of each member, starting with this rank, then backwards round the ring.

    While the caller computes with one block, the next block is in flight.

    Args:
        block: this rank's block, contiguous; only read.
        group: the members, whose blocks have equal shapes.
        buffers: contiguous buffers for the blocks of the other members; this rank's block is not copied there. None: a
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
        partial_sum: computes this rank's partial sum for a member, overwritten here; contiguous, all of one shape.
        group: the members.
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
    """Start sending to the next member and receiving from the previous member; keep both tensors until `wait_all`."""
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
