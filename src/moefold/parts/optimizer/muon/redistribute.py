"""Redistribution of sharded matrices for Muon: gather each on one rank, compute there, scatter the result.

The ranks of a pipeline stage together hold all its parameters, under any tp, ep, etp and FSDP sharding. So one group is
enough for both views, independent of the axes: each rank reports the slice of each tensor that it holds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.bounded_read import batch_by_size
from moefold.comm.collectives import all_to_all
from moefold.comm.groups import Group
from moefold.comm.sharded_tensor import local_slice

BUCKET_ELEMENTS = 1 << 25
"""Approximate number of elements of full matrices in memory per rank at a time, at least one matrix."""


@dataclass(frozen=True, order=True)
class MatrixKey:
    """Key of a 2D parameter, or of one matrix of a 3D parameter."""

    name: str
    index: int = 0


@dataclass(frozen=True)
class MatrixShard:
    """The slice of a matrix that a rank holds."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class _Matrix:
    key: MatrixKey
    shape: tuple[int, int]
    shards: dict[int, MatrixShard]
    """The shard of each member that has a shard."""
    source_members: frozenset[int]
    """Members whose shards together cover the matrix, each element once."""
    owner: int


_LocalRegion = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of a rank's shard in the full tensor."""
_UnassignedMatrix = tuple[MatrixKey, tuple[int, int], dict[int, MatrixShard]]
_Transfer = list[tuple[_Matrix, MatrixShard]]
"""Shards sent from one member to another, in order."""


class MatrixRedistributor:
    """Gathers each matrix of a group of ranks on one owner, with the work balanced over the owners.

    A matrix that some member holds in full is owned by such a member. Every other matrix, the largest first, is
    assigned to the member with the least work. So only sharded matrices are sent.

    The constructor and `run` are collective over the group.

    Args:
        group: the ranks that together hold the tensors: a pipeline stage.
        tensors: tensors by name, the same names on every rank, 2D, or 3D with one matrix per index of the first dim.
        bucket_elements: see `BUCKET_ELEMENTS`.
    """

    def __init__(self, group: Group, tensors: Mapping[str, Tensor], bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self._group = group
        regions = {name: local_slice(tensor) for name, tensor in tensors.items()}
        own_regions = {name: (start, tuple(values.shape)) for name, (values, start) in regions.items()}
        regions_by_rank = [own_regions] * group.size
        if group.size > 1:
            regions_by_rank = [{} for _ in range(group.size)]
            dist.all_gather_object(regions_by_rank, own_regions, group=group.handle)
        self._first_index = {name: start[0] if len(start) == 3 else 0 for name, (start, _) in own_regions.items()}
        unassigned = [
            m for name in sorted(tensors) for m in _matrices(name, tuple(tensors[name].shape), regions_by_rank)
        ]
        self._empty = next((values.new_empty(0) for values, _ in regions.values()), torch.empty(0))
        matrices = _balance_owners(unassigned, group.size)
        self._buckets = list(batch_by_size(matrices, lambda m: m.shape[0] * m.shape[1], bucket_elements * group.size))

    def run(
        self,
        source: Callable[[MatrixKey, int], Tensor],
        compute: Callable[[MatrixKey, Tensor], Tensor],
        sink: Callable[[MatrixKey, int, Tensor], None],
    ) -> None:
        """Gather, process and scatter every matrix. It is collective.

        Args:
            source: returns this rank's shard of a matrix, [rows, columns], for its key and its index in the local
                tensor.
            compute: computes the result of a full matrix, of the same shape and type.
            sink: takes this rank's shard of the result.
        """
        for matrices in self._buckets:
            self._run_bucket(matrices, source, compute, sink)

    def _run_bucket(
        self,
        matrices: Sequence[_Matrix],
        source: Callable[[MatrixKey, int], Tensor],
        compute: Callable[[MatrixKey, Tensor], Tensor],
        sink: Callable[[MatrixKey, int, Tensor], None],
    ) -> None:
        rank = self._group.rank
        members = range(self._group.size)
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        by_owner = [[m for m in matrices if m.owner == member and rank in m.shards] for member in members]
        full_matrices = {matrix.key: self._empty.new_empty(matrix.shape) for matrix in owned}
        sent = [[(m, m.shards[rank]) for m in held_matrices if rank in m.source_members] for held_matrices in by_owner]
        received = [[(m, m.shards[member]) for m in owned if member in m.source_members] for member in members]
        parts = [source(m.key, self._local_index(m.key)) for transfer in sent for m, _ in transfer]
        for matrix, shard, part in self._all_to_all_parts(parts, sent, received):
            full_matrices[matrix.key][shard.rows, shard.columns] = part
        full_matrices = {key: compute(key, full_matrix) for key, full_matrix in full_matrices.items()}
        sent = [[(m, m.shards[member]) for m in owned if member in m.shards] for member in members]
        received = [[(m, m.shards[rank]) for m in held_matrices] for held_matrices in by_owner]
        parts = [full_matrices[m.key][shard.rows, shard.columns] for transfer in sent for m, shard in transfer]
        for matrix, _, part in self._all_to_all_parts(parts, sent, received):
            sink(matrix.key, self._local_index(matrix.key), part)

    def _all_to_all_parts(
        self, parts: Sequence[Tensor], sends: Sequence[_Transfer], receives: Sequence[_Transfer]
    ) -> Iterator[tuple[_Matrix, MatrixShard, Tensor]]:
        """Send the parts by all-to-all, in the order of the members, and yield the received parts."""
        flat = torch.cat([self._empty, *(part.flatten() for part in parts)])
        counts = [
            [sum(shard.numel for _, shard in transfer) for transfer in transfers] for transfers in (sends, receives)
        ]
        received = all_to_all(flat, self._group, *counts)
        pairs = [pair for transfer in receives for pair in transfer]
        parts_received = received.split([shard.numel for _, shard in pairs])
        for (matrix, shard), values in zip(pairs, parts_received, strict=True):
            yield matrix, shard, values.view(shard.shape)

    def _local_index(self, key: MatrixKey) -> int:
        return key.index - self._first_index[key.name]


def _matrices(
    name: str, shape: tuple[int, ...], regions: Sequence[Mapping[str, _LocalRegion]]
) -> Iterator[_UnassignedMatrix]:
    """Yield the matrices of a tensor, each with the shards of all members."""
    num_rows, num_columns = shape[-2:]
    for index in range(shape[0] if len(shape) == 3 else 1):
        shards = {}
        for member, member_regions in enumerate(regions):
            start, size = member_regions[name]
            holds = len(shape) == 2 or start[0] <= index < start[0] + size[0]
            if holds and 0 not in size:
                rows, columns = (slice(a, a + n) for a, n in zip(start[-2:], size[-2:], strict=True))
                shards[member] = MatrixShard(rows, columns)
        yield MatrixKey(name, index), (num_rows, num_columns), shards


def _balance_owners(matrices: Sequence[_UnassignedMatrix], num_members: int) -> list[_Matrix]:
    """Assign each matrix an owner, so that the work is balanced, with the same result on every rank."""

    def cost(entry: _UnassignedMatrix) -> int:
        (_, (rows, columns), _) = entry
        return rows * columns * min(rows, columns)

    def holders(entry: _UnassignedMatrix) -> list[int]:
        _, (rows, columns), shards = entry
        return [member for member, shard in shards.items() if shard.shape == (rows, columns)]

    work = [0] * num_members
    assigned = []
    # Matrices held in full by a member come first, as their owners are fixed. All others then even out the load.
    for entry in sorted(matrices, key=lambda entry: (not holders(entry), -cost(entry), entry[0])):
        key, shape, shards = entry
        owner = min(holders(entry) or range(num_members), key=lambda member: (work[member], member))
        work[owner] += cost(entry)
        sources: dict[tuple[int, ...], int] = {}
        for member in (owner, *shards):
            # A shard of the owner itself need not be sent.
            if member in shards:
                shard = shards[member]
                sources.setdefault((shard.rows.start, shard.columns.start), member)
        assigned.append(_Matrix(key, shape, shards, frozenset(sources.values()), owner))
    return assigned
