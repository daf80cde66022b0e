"""All-gather and reduce-scatter through shared memory give the results of torch's collectives."""

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


def _many_pieces(dtype: torch.dtype) -> None:
    """Exchange tensors of several pieces, the last one shorter, many times through the same memory."""
    group = _group()
    before = shared_memory.PIECE_BYTES
    shared_memory.PIECE_BYTES = 96
    try:
        exchange = open_shared_exchange(group, CPU)
        assert exchange is not None
        for round_ in range(8):
            of_members = [_values(member, round_, dtype) for member in range(3)]
            mine = of_members[group.rank].clone()
            total = torch.full((7, 5), float("nan"), dtype=dtype)
            exchange.sum_scatter_into(total, mine)
            assert torch.equal(total, (of_members[0] + of_members[1] + of_members[2]).chunk(3)[group.rank])
            assert torch.equal(mine, of_members[group.rank]), "the input is only read"
            gathered = torch.full((63, 5), float("nan"), dtype=dtype)
            exchange.gather_into(gathered, mine)
            assert torch.equal(gathered, torch.cat(of_members))
            room = torch.full_like(gathered, float("nan"))
            own = room.chunk(3)[group.rank]
            own.copy_(mine)
            exchange.gather_into(room, own)
            assert torch.equal(room, gathered)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_through_shared_memory(pool, dtype):
    pool.run(3, _many_pieces, dtype)


def test_without_shared_memory_there_is_no_exchange(pool):
    pool.run(3, _ranks_of_several_machines_have_none)
