"""All-gathers and sums through shared memory give the results of torch's operations on one rank."""

import pytest
import torch

from moefold.comm import shared_memory
from moefold.comm.groups import Group, ParallelGroups
from moefold.comm.shared_memory import open_shared_exchange
from moefold.errors import RunError
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity
CPU = torch.device("cpu")


def _group() -> Group:
    return ParallelGroups.create(fold(world_size=3), CPU).attn.dp_cp


def _values(member: int, round_: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * round_ + member)
    return torch.randn(21, 5, generator=generator, dtype=torch.float64).to(dtype)


def _sum(of_members: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    first, second, third = (x.to(dtype) for x in of_members)
    return first + second + third


def _many_pieces(dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
    """Exchange tensors of several pieces, the last one shorter, many times through the same memory."""
    group = _group()
    before = shared_memory.PIECE_BYTES
    shared_memory.PIECE_BYTES = 96
    try:
        exchange = open_shared_exchange(group, CPU)
        assert exchange is not None
        for round_ in range(4):
            of_members = [_values(member, round_, dtype) for member in range(3)]
            mine = of_members[group.rank].clone()
            gathered = torch.full((63, 5), float("nan"), dtype=dtype)
            exchange.gather_into(gathered, mine)
            assert torch.equal(gathered, torch.cat(of_members))
            room = torch.full_like(gathered, float("nan"))
            own = room.chunk(3)[group.rank]
            own.copy_(mine)
            exchange.gather_into(room, own)
            assert torch.equal(room, gathered)

            # Rows that are cut evenly, unevenly, and too few for all; columns of a larger matrix; one value.
            lists = [[x, x[:8, :3], x[:4].T, x[:2], x[3, :1]] for x in of_members]
            expected = [_sum(list(of_one), sum_dtype) for of_one in zip(*lists, strict=True)]
            parts = exchange.sum_scatter(lists[group.rank], sum_dtype)
            for part, whole in zip(parts, expected, strict=True):
                cut = [*whole.chunk(3), whole[:0], whole[:0]]
                assert torch.equal(part, cut[group.rank])
                assert part.dtype == sum_dtype
            sums = exchange.sum(lists[group.rank], sum_dtype)
            assert all(torch.equal(total, whole) for total, whole in zip(sums, expected, strict=True))
            assert torch.equal(of_members[group.rank], mine), "the terms are only read"
    finally:
        shared_memory.PIECE_BYTES = before


def _ranks_of_several_machines_have_none() -> None:
    group = _group()
    before = shared_memory.open_shared_memory

    def refuse(num_bytes: int, group: Group, purpose: str) -> torch.Tensor:
        raise RunError("it is on another machine")

    shared_memory.open_shared_memory = refuse
    try:
        assert open_shared_exchange(group, CPU) is None
    finally:
        shared_memory.open_shared_memory = before
    assert open_shared_exchange(group, torch.device("cuda")) is None


@pytest.mark.parametrize(("dtype", "sum_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_pieces_through_shared_memory(pool, dtype, sum_dtype):
    pool.run(3, _many_pieces, dtype, sum_dtype)


def test_without_shared_memory_there_is_no_exchange(pool):
    pool.run(3, _ranks_of_several_machines_have_none)


def _other_tensors_of_one_shape(of_one: str) -> str:
    """Sum two of three tensors, on one rank another two, or as a gather: shapes and numbers of tensors are equal."""
    group = _group()
    exchange = open_shared_exchange(group, CPU)
    assert exchange is not None
    tensors = [torch.ones(4, 2), torch.ones(4, 2)]
    differs = group.rank == 1
    text = ""
    try:
        if of_one == "gather" and differs:
            exchange.gather_into(torch.zeros(12, 2), torch.ones(4, 2))
        elif of_one == "sum":
            exchange.sum(tensors, torch.float32, [0, 2] if differs else [0, 1])
        else:
            exchange.sum_scatter(tensors, torch.float32, [0, 2] if differs else [0, 1])
    except (RunError, torch.distributed.DistError) as error:
        text = str(error)
    del exchange
    torch.distributed.barrier()
    return text


@pytest.mark.parametrize("of_one", ["sum", "sum_scatter", "gather"])
def test_a_member_that_passes_other_tensors_ends_the_exchange(pool, of_one):
    texts = pool.run(3, _other_tensors_of_one_shape, of_one)
    assert any("ranks of a group must exchange the same tensors in the same order" in text for text in texts)
    assert all(texts)
