"""Ring collectives give the results of torch's collectives."""

import pytest
import torch

from moefold.comm.collectives import ring_pass, ring_reduce_scatter
from moefold.comm.groups import ParallelGroups
from moefold.topology.layout import fold

pytestmark = pytest.mark.parity


def _blocks() -> None:
    tp = ParallelGroups.create(fold(world_size=4, tp=4), torch.device("cpu")).attn.tp
    mine = torch.full((2, 3), float(tp.rank))
    seen = [(source, block.clone()) for source, block in ring_pass(mine, tp)]
    assert [source for source, _ in seen] == [(tp.rank - step) % 4 for step in range(4)]
    assert all((block == source).all() for source, block in seen)
    assert (mine == tp.rank).all()
    room = torch.full((4, 2, 3), float("nan"))
    room[tp.rank] = mine
    for source, block in ring_pass(room[tp.rank], tp, room.unbind()):
        assert block.data_ptr() == room[source].data_ptr()
    assert torch.equal(room, torch.arange(4.0).view(4, 1, 1).expand(4, 2, 3))


def _sums() -> None:
    tp = ParallelGroups.create(fold(world_size=4, tp=4), torch.device("cpu")).attn.tp
    asked = []

    def share(member: int) -> torch.Tensor:
        asked.append(member)
        return torch.full((3,), float(10**tp.rank * (member + 1)))

    assert torch.equal(ring_reduce_scatter(share, tp), torch.full((3,), 1111.0 * (tp.rank + 1)))
    assert sorted(asked) == [0, 1, 2, 3]
    assert asked[-1] == tp.rank, "what is for me needs no journey, so it comes last"


@pytest.mark.parametrize("run", [_blocks, _sums])
def test_ring_collectives_equal_torch(pool, run):
    pool.run(4, run)
