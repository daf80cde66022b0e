"""Exchanges that are under way while something else is computed."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moefold.comm.async_collectives import (
    AsyncResult,
    async_all_gather,
    async_all_gather_uneven,
    async_all_to_all,
    async_reduce_scatter,
    async_reduce_scatter_uneven,
)
from moefold.comm.collectives import all_gather, all_to_all
from moefold.comm.groups import Group, ParallelGroups
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity

ROWS = [[1, 3], [0, 2]]
"""ROWS[i][j]: rows from member i to member j."""

LETTING_GO_S = 10.0
"""Seconds after which a tensor that is still alive has an owner."""


def _group() -> Group:
    return ParallelGroups.create(fold(world_size=2, ep=2), torch.device("cpu")).moe.ep


def _rows(group: Group) -> tuple[Tensor, list[int], list[int]]:
    """Rows that say whose they are, with the counts that I send and receive."""
    sent, received = ROWS[group.rank], [row[group.rank] for row in ROWS]
    x = torch.arange(2.0 * sum(sent), dtype=torch.float64).view(-1, 2) + 1000 * (group.rank + 1)
    return x.requires_grad_(), sent, received


def _value_and_gradient(y: Tensor, x: Tensor) -> list[Tensor]:
    weight = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    return [y.detach(), gradient]


def _both_ways() -> None:
    group = _group()
    x, sent, received = _rows(group)
    at_once = _value_and_gradient(all_to_all(x, group, sent, received), x)
    flying = _value_and_gradient(async_all_to_all(x, group, sent, received).wait(), x)
    torch.testing.assert_close(flying, at_once, rtol=0, atol=0)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    at_once = _value_and_gradient(all_gather(x, group), x)
    flying = _value_and_gradient(async_all_gather(x, group).wait(), x)
    torch.testing.assert_close(flying, at_once, rtol=0, atol=0)


def test_equals_the_exchange_at_once(pool):
    pool.run(2, _both_ways)


def _is_let_go(reference: weakref.ref[Tensor]) -> bool:
    """Return whether the tensor goes away; gloo's thread has it in its hands a moment longer than `wait` lasts."""
    gc.collect()
    deadline = time.monotonic() + LETTING_GO_S
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return reference() is None


def _nobody_keeps_what_was_sent() -> None:
    group = _group()
    starts = {
        "all_to_all": lambda x: async_all_to_all(x, group, [1, 1], [1, 1]),
        "all_gather": lambda x: async_all_gather(x, group),
        "all_gather_rows": lambda x: async_all_gather_uneven(x, group, [2, 2]),
        "reduce_scatter": lambda x: async_reduce_scatter(x, group),
        "reduce_scatter_rows": lambda x: async_reduce_scatter_uneven(x, group, [1, 1]),
    }
    for kind, start in starts.items():
        x = torch.randn(2, 2, requires_grad=True)
        rows = x + 1
        sent = weakref.ref(rows)
        in_flight = start(rows)
        y = in_flight.wait()
        del rows, in_flight
        assert _is_let_go(sent), kind
        y.sum().backward()
        assert x.grad is not None, kind


def test_the_graph_of_an_exchange_keeps_nothing_that_was_sent(pool):
    pool.run(2, _nobody_keeps_what_was_sent)


def _one_rank() -> None:
    group = ParallelGroups.create(fold(world_size=1), torch.device("cpu")).moe.ep
    x = torch.randn(3, 2)
    assert async_all_gather(x, group).wait() is x
    assert async_all_to_all(x, group, [3], [3]).wait() is x


def test_one_rank_exchanges_nothing(pool):
    pool.run(1, _one_rank)


class _Meet(Function):
    """Rank 1 says that it came by, forward and backward; rank 0 does nothing."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        _say("computing forward")
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        _say("computing backward")
        return grad


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _say(what: str) -> None:
    if dist.get_rank() == 1:
        _store().set(what, "1")


def _hear(what: str) -> None:
    if dist.get_rank() == 0:
        _store().wait([what])


def _start(kind: str, x: Tensor, group: Group) -> AsyncResult:
    return async_all_gather(x, group) if kind == "gather" else async_all_to_all(x, group, [1, 1], [1, 1])


def _beside(kind: str) -> None:
    """Rank 0 joins each exchange only once rank 1, which began it before, computes: so rank 1 must not be waiting."""
    group = _group()
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    _hear("computing forward")
    in_flight = _start(kind, x, group)
    computed = _Meet.apply(x)
    y = in_flight.wait()
    y.register_hook(lambda grad: _hear("computing backward"))
    (y.sum() + computed.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0 if kind == "gather" else 2.0))


@pytest.mark.parametrize("kind", ["all-to-all", "gather"])
def test_compute_between_start_and_end_hides_the_exchange_in_both_directions(pool, kind):
    pool.run(2, _beside, kind)
