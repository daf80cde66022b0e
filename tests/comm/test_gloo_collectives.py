"""All-gather and reduce-scatter by messages on gloo give the results of torch's collectives."""

import pytest
import torch
import torch.distributed as dist

from moefold.comm import collectives
from moefold.comm.collectives import all_gather_into, reduce_scatter_into
from moefold.comm.gloo_collectives import begin_gather, begin_sum_scatter, uses_gloo
from moefold.comm.groups import Group, ParallelGroups
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity


def _group() -> Group:
    return ParallelGroups.create(fold(world_size=3), torch.device("cpu")).attn.dp_cp


def _values(member: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(member)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)


def _sums_are_added_in_the_order_of_the_members(dtype: torch.dtype) -> None:
    group = _group()
    of_members = [_values(member, dtype) for member in range(3)]
    mine = of_members[group.rank]
    out = torch.empty(2, 5, dtype=dtype)
    begin_sum_scatter(out, mine, group.handle).wait()
    expected = (of_members[0] + of_members[1] + of_members[2]).chunk(3)[group.rank]
    assert torch.equal(out, expected)
    assert torch.equal(mine, _values(group.rank, dtype)), "the input is only read"


def _gathers_in_place_and_from_elsewhere(dtype: torch.dtype) -> None:
    group = _group()
    expected = torch.cat([_values(member, dtype) for member in range(3)])
    out = torch.empty_like(expected)
    begin_gather(out, _values(group.rank, dtype), group.handle).wait()
    assert torch.equal(out, expected)
    room = torch.full_like(expected, float("nan"))
    own = room.chunk(3)[group.rank]
    own.copy_(_values(group.rank, dtype))
    assert all_gather_into(room, own, group.handle) is None
    assert torch.equal(room, expected)


def _collectives_in_flight_at_the_same_time_stay_apart(dtype: torch.dtype) -> None:
    group = _group()
    first, second = torch.empty(2, 6, dtype=dtype)
    total = torch.empty(1, dtype=dtype)
    rows = torch.full((2, 2), float(group.rank), dtype=dtype) + torch.tensor([[0], [10]])
    summands = torch.arange(3, dtype=dtype) + group.rank
    works = [
        begin_gather(first, rows[0], group.handle),
        begin_sum_scatter(total, summands, group.handle),
        begin_gather(second, rows[1], group.handle),
    ]
    for work in reversed(works):
        work.wait()
    assert first.tolist() == [0, 0, 1, 1, 2, 2]
    assert second.tolist() == [10, 10, 11, 11, 12, 12]
    assert total.tolist() == [3 * group.rank + 3]


def _agrees_with_torch(dtype: torch.dtype) -> None:
    """Run torch's own collectives on the same tensors: the messages are used here, and change no number."""
    group = _group()
    rows = _values(group.rank, torch.float64).to(dtype)
    assert uses_gloo(group.handle, rows.device)
    ours = torch.empty(2, 5, dtype=dtype)
    theirs = torch.empty(2, 5, dtype=dtype)
    reduce_scatter_into(ours, rows, group.handle)
    collectives._reduce_scatter(theirs, rows, op=dist.ReduceOp.SUM, group=group.handle)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = torch.empty(2, 18, 5, dtype=dtype)
    all_gather_into(ours, rows, group.handle)
    collectives._all_gather(theirs, rows, group=group.handle)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "run",
    [
        _sums_are_added_in_the_order_of_the_members,
        _gathers_in_place_and_from_elsewhere,
        _collectives_in_flight_at_the_same_time_stay_apart,
        _agrees_with_torch,
    ],
)
def test_collectives_by_messages_equal_torch(pool, run, dtype):
    pool.run(3, run, dtype)
