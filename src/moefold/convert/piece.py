"""Where the values of a tensor of ours are in tensors of theirs: boxes of one, boxes of the other. Integers only."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""A slice of every dim, with start and stop."""


@dataclass(frozen=True)
class Piece:
    """A box of one of our parameters, equal to a box of one tensor of theirs with its dims in another order.

    Attributes:
        ours: our name.
        our_start: first index of the box, for each of our dims.
        size: size of the box, for each of our dims.
        theirs: their name.
        their_start: first index of the box, for each of their dims.
        their_step: distance of neighbours, for each of their dims.
        dims: for each of our dims the dim of theirs that runs along it; None for one that theirs lacks (of size 1).
    """

    ours: str
    our_start: Shape
    size: Shape
    theirs: str
    their_start: Shape
    their_step: Shape
    dims: tuple[int | None, ...]

    def part(self, region: Region) -> "Piece | None":
        """The part of the piece that lies in a region of our tensor; None if they do not meet."""
        start = [max(s, r.start) for s, r in zip(self.our_start, region, strict=True)]
        stop = [min(s + n, r.stop) for s, n, r in zip(self.our_start, self.size, region, strict=True)]
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(n <= 0 for n in size):
            return None
        their_start = list(self.their_start)
        for ours, theirs in enumerate(self.dims):
            if theirs is not None:
                their_start[theirs] += (start[ours] - self.our_start[ours]) * self.their_step[theirs]
        return Piece(self.ours, tuple(start), size, self.theirs, tuple(their_start), self.their_step, self.dims)

    def in_their_rows(self, start: int, stop: int) -> "Piece | None":
        """The part of the piece that lies in some rows (indices of the first dim) of theirs; None if there is none."""
        first, step, dim = self.their_start[0], self.their_step[0], self.dims.index(0)
        begin, end = (max(0, -(-(row - first) // step)) for row in (start, stop))
        region = [slice(a, a + n) for a, n in zip(self.our_start, self.size, strict=True)]
        region[dim] = slice(self.our_start[dim] + begin, self.our_start[dim] + end)
        return self.part(tuple(region))

    def our_region(self) -> Region:
        """The box in our tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.our_start, self.size, strict=True))

    def their_region(self) -> Region:
        """The box in their tensor, with steps."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(
            slice(start, start + (sizes[dim] - 1) * step + 1, step)
            for dim, (start, step) in enumerate(zip(self.their_start, self.their_step, strict=True))
        )

    def order(self) -> tuple[int, ...]:
        """Their dims in our order."""
        return tuple(dim for dim in self.dims if dim is not None)

    def reverse_order(self) -> tuple[int, ...]:
        """The place of each of their dims among those of `order`."""
        order = self.order()
        return tuple(order.index(dim) for dim in range(len(order)))

    def their_size(self) -> Shape:
        """Size of the box in the order of their dims."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(sizes[dim] for dim in range(len(self.their_start)))


@dataclass(frozen=True)
class Plan:
    """Every piece of a model, by our names and by theirs."""

    by_ours: Mapping[str, tuple[Piece, ...]]
    by_theirs: Mapping[str, tuple[Piece, ...]]
    our_shapes: Mapping[str, Shape]
    their_shapes: Mapping[str, Shape]


def make_plan(pieces: Iterable[Piece], our_shapes: Mapping[str, Shape]) -> Plan:
    """Collect pieces, which must fill every tensor of both sides exactly once."""
    by_ours: dict[str, list[Piece]] = {name: [] for name in our_shapes}
    by_theirs: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_ours[piece.ours].append(piece)
        by_theirs.setdefault(piece.theirs, []).append(piece)
    their_shapes = {name: _hull(parts) for name, parts in by_theirs.items()}
    for name, parts, shape in (*_with(by_ours, our_shapes), *_with(by_theirs, their_shapes)):
        assert sum(math.prod(piece.size) for piece in parts) == math.prod(shape), (name, shape)
    return Plan(
        {name: tuple(parts) for name, parts in by_ours.items()},
        {name: tuple(parts) for name, parts in by_theirs.items()},
        dict(our_shapes),
        their_shapes,
    )


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def _hull(pieces: list[Piece]) -> Shape:
    ends = [[s.stop for s in piece.their_region()] for piece in pieces]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _with(groups: Mapping[str, list[Piece]], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, list[Piece], Shape]]:
    for name, parts in groups.items():
        yield name, parts, shapes[name]
