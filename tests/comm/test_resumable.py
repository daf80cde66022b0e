"""A forward pass overlapped with a backward pass resumes at each collective, and blocks in no pass."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.async_collectives import (
    async_all_gather_uneven,
    async_all_to_all,
    async_reduce_scatter,
    async_reduce_scatter_uneven,
)
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.resumable import BackwardOverlap, Resumable, ResumableTask, run_to_end
from moefold.topology.layout import fold


def _counted(log: list[str], name: str, pauses: int) -> Resumable[str]:
    for i in range(pauses):
        log.append(f"{name}{i}")
        yield
    log.append(f"{name} ends")
    return name


def test_steps_go_on_where_they_stand():
    log: list[str] = []
    begun = ResumableTask(_counted(log, "a", 2))
    assert log == []
    begun.resume()
    assert log == ["a0"]
    assert not begun.is_done
    assert begun.run_to_end() == "a"
    assert log == ["a0", "a1", "a ends"]
    begun.resume()
    assert begun.is_done
    assert begun.run_to_end() == "a"
    assert run_to_end(_counted(log, "b", 0)) == "b"


def test_rest_begins_with_the_pause_at_which_the_steps_stand():
    log: list[str] = []
    begun = ResumableTask(_counted(log, "a", 1))
    begun.resume()
    rest = begun.remaining()
    next(rest)
    assert log == ["a0"]
    with pytest.raises(StopIteration):
        next(rest)
    assert log == ["a0", "a ends"]


def test_overlap_is_active_only_in_a_backward_pass():
    overlap = BackwardOverlap()
    log = []
    overlap.resume()
    with overlap.backward(ResumableTask(_counted(log, "a", 3))):
        overlap.resume()
    overlap.resume()
    assert log == ["a0"]
    with pytest.raises(ZeroDivisionError), overlap.backward(ResumableTask(_counted(log, "b", 3))):
        raise ZeroDivisionError
    overlap.resume()
    assert log == ["a0"]


class _Hook(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, overlap: BackwardOverlap) -> Tensor:
        ctx.overlap = overlap
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        ctx.overlap.resume()
        return grad, None


def test_the_forward_pass_makes_a_graph_in_the_thread_that_trains():
    overlap = BackwardOverlap()
    seen = []
    w = torch.ones(3, requires_grad=True)

    def forward() -> Resumable[Tensor]:
        seen.append((threading.get_ident(), torch.is_grad_enabled()))
        y = w * 2
        yield
        return y * 3

    begun = ResumableTask(forward())
    x = torch.ones(3, requires_grad=True)
    with overlap.backward(begun):
        _Hook.apply(x * 5, overlap).sum().backward()
    assert seen == [(threading.get_ident(), True)]
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    begun.run_to_end().sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 6.0))


ROWS = [2, 1]


def _adjoints() -> None:
    """Each exchange and its gradient against sums by hand, on two ranks."""
    group = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu")).moe.ep
    me, mine = group.rank, ROWS[group.rank]
    x = (torch.arange(2.0 * mine, dtype=torch.float64).view(mine, 2) + 100 * me).requires_grad_()
    y = run_to_end(async_all_gather_uneven(x, group, ROWS).wait_resumable())
    both = [torch.arange(2.0 * rows, dtype=torch.float64).view(rows, 2) + 100 * i for i, rows in enumerate(ROWS)]
    assert torch.equal(y, torch.cat(both))
    (grad,) = torch.autograd.grad((y * (me + 1)).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 3.0))
    z = (torch.arange(6.0, dtype=torch.float64).view(3, 2) * (me + 1)).requires_grad_()
    part = run_to_end(async_reduce_scatter_uneven(z, group, ROWS).wait_resumable())
    assert torch.equal(part, torch.arange(6.0, dtype=torch.float64).view(3, 2).split(ROWS)[me] * 3)
    (grad,) = torch.autograd.grad((part * (me + 1)).sum(), z)
    assert torch.equal(grad, torch.tensor([[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64))
    even = torch.arange(4.0, dtype=torch.float64).view(2, 2).requires_grad_()
    part = run_to_end(async_reduce_scatter(even, group).wait_resumable())
    assert torch.equal(part, 2 * even.detach()[me : me + 1])
    (grad,) = torch.autograd.grad((part * (me + 1)).sum(), even)
    assert torch.equal(grad, torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64))


@pytest.mark.parity
def test_exchanges_with_a_pause_are_those_without(pool):
    pool.run(2, _adjoints)


def _meet(rank: int, what: str) -> None:
    """Rank 1 says that it came by, and rank 0 waits until it has heard."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set(what, "1")
    else:
        store.wait([what])


def _layer(x: Tensor, group: Group, name: str) -> Resumable[Tensor]:
    """Out and home, with rank 0 joining the second exchange only once rank 1 is past the first pause."""
    rows = yield from async_all_to_all(x, group, [1, 1], [1, 1]).wait_resumable()
    _meet(group.rank, f"{name} is out")
    return (yield from async_all_to_all(rows * 2, group, [1, 1], [1, 1]).wait_resumable())


class _Late(torch.autograd.Function):
    """In the backward pass rank 0 comes here only once rank 1 has gone on with the forward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.group.rank == 0:
            _meet(0, "went on")
        return grad, None


def _beside() -> None:
    """Rank 1 must not wait for its gradients before the forward pass goes on: rank 0 sends none before it has."""
    groups = ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu"))
    group = groups.moe.ep
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    first = _Late.apply(run_to_end(_layer(x, group, "first")), group)

    def second() -> Resumable[Tensor]:
        if group.rank == 1:
            _meet(1, "went on")
        return (yield from _layer(x.detach(), group, "second"))

    begun = ResumableTask(second())
    with groups.backward_overlap.backward(begun):
        first.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert torch.equal(begun.run_to_end(), x.detach() * 2)


@pytest.mark.parity
def test_forward_pass_resumes_before_the_backward_pass_waits(pool):
    pool.run(2, _beside, timeout_s=30.0)
