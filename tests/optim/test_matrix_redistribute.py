"""Whole matrices come together once each, and everyone gets back the part it holds."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.process_group import make_group
from moefold.parts.optimizer.muon.redistribute import MatrixKey, MatrixRedistributor

pytestmark = pytest.mark.parity

SHAPES = {"whole": (5, 3), "rows": (7, 4), "columns": (4, 9), "both": (6, 6), "experts": (4, 3, 2), "few": (2, 3, 2)}


def _values(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 100 * list(SHAPES).index(name)


def _exchange_twice(
    bucket_elements: int,
) -> tuple[list[tuple[MatrixKey, tuple[int, ...]]], dict[str, tuple[Tensor, Tensor]]]:
    """Return this rank's work, and its parts of three times every matrix, of the first and of a second use."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {
        "whole": (Replicate(), Replicate()),
        "rows": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "both": (Shard(0), Shard(1)),
        "experts": (Shard(0), Shard(1)),
        "few": (Shard(0), Shard(0)),
    }
    tensors = {name: distribute_tensor(_values(name), mesh, placements[name]) for name in SHAPES}
    group = make_group(tuple(range(4)), rank, torch.distributed.group.WORLD)
    exchange = MatrixRedistributor(group, tensors, bucket_elements)
    worked: list[tuple[MatrixKey, tuple[int, ...]]] = []
    parts: dict[str, tuple[Tensor, Tensor]] = {}

    def mine(key: MatrixKey, place: int) -> Tensor:
        values = tensors[key.name].to_local()
        return values if values.dim() == 2 else values[place]

    def work(key: MatrixKey, whole: Tensor) -> Tensor:
        expected = _values(key.name)
        assert torch.equal(whole, expected if expected.dim() == 2 else expected[key.index])
        worked.append((key, tuple(whole.shape)))
        return whole * 3

    def put(key: MatrixKey, place: int, part: Tensor) -> None:
        mine(key, place).mul_(0).add_(part / 3)
        parts[f"{key}"] = (part.clone(), mine(key, place).clone())

    exchange.run(mine, work, put)
    exchange.run(mine, work, put)
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), _values(name)), name
    return worked, parts


@pytest.mark.parametrize("bucket_elements", [1, 1 << 20])
def test_each_matrix_is_worked_on_once_and_all_parts_come_home(pool, bucket_elements):
    of_ranks = pool.run(4, _exchange_twice, bucket_elements)
    worked = [key for keys, _ in of_ranks for key, _ in keys]
    expected = [MatrixKey(name, i) for name, shape in SHAPES.items() for i in range(shape[0] if len(shape) == 3 else 1)]
    assert sorted(worked) == sorted(expected * 2)
    assert all(keys for keys, _ in of_ranks), "the work is shared"
    for rank, (_, parts) in enumerate(of_ranks):
        assert parts, rank
        assert all(torch.equal(part, kept * 3) for part, kept in parts.values())
