"""Whole matrices for those who must see them whole: each comes together on one rank, and goes back in its parts.

The ranks of a pipeline stage hold all its parameters between them, whatever tp, ep, etp and FSDP cut. So one group is
enough for both views, and nothing needs to know which axis cut what: each rank says which box of each tensor it holds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.bounded_read import batch_by_size
from moefold.comm.collectives import all_to_all
from moefold.comm.groups import Group
from moefold.model.init import local_slice

ROUND_ELEMENTS = 1 << 25
"""A rank has about so many elements of whole matrices in memory at a time, or one matrix."""


@dataclass(frozen=True, order=True)
class MatrixKey:
    """A parameter of two dims, or one matrix of a parameter of three."""

    name: str
    index: int = 0


@dataclass(frozen=True)
class MatrixShard:
    """The part of a matrix that a rank holds."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class _Matrix:
    key: MatrixKey
    shape: tuple[int, int]
    shards: dict[int, MatrixShard]
    """What each member holds of it, if anything."""
    source_members: frozenset[int]
    """Members that hold it all between them, each element once."""
    owner: int


_LocalRegion = tuple[tuple[int, ...], tuple[int, ...]]
"""Where in its tensor what a rank holds starts, and how large it is."""
_UnassignedMatrix = tuple[MatrixKey, tuple[int, int], dict[int, MatrixShard]]
_Transfer = list[tuple[_Matrix, MatrixShard]]
"""What goes from one member to another, in order."""


class MatrixRedistributor:
    """Lets each matrix be worked on whole, by one member of a group, and the work be shared evenly.

    A matrix that some member holds whole is worked on there; of the others, the largest first, each goes to the
    member that has the least to do. So nothing travels that need not.

    Collective over the group to make, and to use.

    Args:
        group: the ranks that hold the tensors between them: a pipeline stage.
        tensors: by name, the same names on every rank; of two dims, or matrices along a first third one.
        round_elements: see `ROUND_ELEMENTS`.
    """

    def __init__(self, group: Group, tensors: Mapping[str, Tensor], round_elements: int = ROUND_ELEMENTS) -> None:
        self._group = group
        regions = {name: local_slice(tensor) for name, tensor in tensors.items()}
        mine = {name: (start, tuple(values.shape)) for name, (values, start) in regions.items()}
        of_ranks = [mine] * group.size
        if group.size > 1:
            of_ranks = [{} for _ in range(group.size)]
            dist.all_gather_object(of_ranks, mine, group=group.handle)
        self._first_index = {name: start[0] if len(start) == 3 else 0 for name, (start, _) in mine.items()}
        found = [m for name in sorted(tensors) for m in _matrices(name, tuple(tensors[name].shape), of_ranks)]
        self._empty = next((values.new_empty(0) for values, _ in regions.values()), torch.empty(0))
        self._rounds = list(batch_by_size(_balance_owners(found, group.size), _numel, round_elements * group.size))

    def run(
        self,
        source: Callable[[MatrixKey, int], Tensor],
        work: Callable[[MatrixKey, Tensor], Tensor],
        sink: Callable[[MatrixKey, int, Tensor], None],
    ) -> None:
        """Have every matrix worked on; collective.

        Args:
            source: gives my part of a matrix, [rows, columns]; the second argument is its place in my local tensor.
            work: makes of a whole matrix one of the same shape and type.
            sink: takes my part of that.
        """
        for matrices in self._rounds:
            self._run_round(matrices, source, work, sink)

    def _run_round(
        self,
        matrices: Sequence[_Matrix],
        source: Callable[[MatrixKey, int], Tensor],
        work: Callable[[MatrixKey, Tensor], Tensor],
        sink: Callable[[MatrixKey, int, Tensor], None],
    ) -> None:
        me = self._group.rank
        members = range(self._group.size)
        owned = [matrix for matrix in matrices if matrix.owner == me]
        of_owner = [[m for m in matrices if m.owner == other and me in m.shards] for other in members]
        wholes = {matrix.key: self._empty.new_empty(matrix.shape) for matrix in owned}
        sent = [[(m, m.shards[me]) for m in given if me in m.source_members] for given in of_owner]
        taken = [[(m, m.shards[other]) for m in owned if other in m.source_members] for other in members]
        parts = [source(m.key, self._local_index(m.key)) for leg in sent for m, _ in leg]
        for matrix, box, part in self._all_to_all_parts(parts, sent, taken):
            wholes[matrix.key][box.rows, box.columns] = part
        wholes = {key: work(key, whole) for key, whole in wholes.items()}
        sent = [[(m, m.shards[other]) for m in owned if other in m.shards] for other in members]
        taken = [[(m, m.shards[me]) for m in given] for given in of_owner]
        parts = [wholes[m.key][box.rows, box.columns] for leg in sent for m, box in leg]
        for matrix, _, part in self._all_to_all_parts(parts, sent, taken):
            sink(matrix.key, self._local_index(matrix.key), part)

    def _all_to_all_parts(
        self, parts: Sequence[Tensor], sends: Sequence[_Transfer], receives: Sequence[_Transfer]
    ) -> Iterator[tuple[_Matrix, MatrixShard, Tensor]]:
        """All-to-all of parts, those for the first member first; gives what arrives, part by part."""
        flat = torch.cat([self._empty, *(part.flatten() for part in parts)])
        counts = [[sum(box.numel for _, box in leg) for leg in legs] for legs in (sends, receives)]
        arrived = all_to_all(flat, self._group, *counts)
        pairs = [pair for leg in receives for pair in leg]
        pieces = arrived.split([box.numel for _, box in pairs])
        for (matrix, box), piece in zip(pairs, pieces, strict=True):
            yield matrix, box, piece.view(box.shape)

    def _local_index(self, key: MatrixKey) -> int:
        return key.index - self._first_index[key.name]


def _matrices(
    name: str, shape: tuple[int, ...], regions: Sequence[Mapping[str, _LocalRegion]]
) -> Iterator[_UnassignedMatrix]:
    """The matrices of a tensor, each with what every member holds of it."""
    num_rows, num_columns = shape[-2:]
    for index in range(shape[0] if len(shape) == 3 else 1):
        boxes = {}
        for member, of_member in enumerate(regions):
            start, size = of_member[name]
            holds = len(shape) == 2 or start[0] <= index < start[0] + size[0]
            if holds and 0 not in size:
                rows, columns = (slice(a, a + n) for a, n in zip(start[-2:], size[-2:], strict=True))
                boxes[member] = MatrixShard(rows, columns)
        yield MatrixKey(name, index), (num_rows, num_columns), boxes


def _balance_owners(matrices: Sequence[_UnassignedMatrix], num_members: int) -> list[_Matrix]:
    """Give each matrix an owner, so that all have about the same to do; the same result on every rank."""

    def cost(entry: _UnassignedMatrix) -> int:
        (_, (rows, columns), _) = entry
        return rows * columns * min(rows, columns)

    def holders(entry: _UnassignedMatrix) -> list[int]:
        _, (rows, columns), boxes = entry
        return [member for member, box in boxes.items() if box.shape == (rows, columns)]

    work = [0] * num_members
    dealt = []
    # Those that are whole somewhere first: of the others, which may go anywhere, some fill what they leave uneven.
    for entry in sorted(matrices, key=lambda entry: (not holders(entry), -cost(entry), entry[0])):
        key, shape, boxes = entry
        owner = min(holders(entry) or range(num_members), key=lambda member: (work[member], member))
        work[owner] += cost(entry)
        sources: dict[tuple[int, ...], int] = {}
        for member in (owner, *boxes):
            # The owner's own copy, if it has one, need not travel.
            if member in boxes:
                box = boxes[member]
                sources.setdefault((box.rows.start, box.columns.start), member)
        dealt.append(_Matrix(key, shape, boxes, frozenset(sources.values()), owner))
    return dealt


def _numel(matrix: _Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]
