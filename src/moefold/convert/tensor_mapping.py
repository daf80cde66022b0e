"""Where the values of a tensor of ours are in tensors of theirs: boxes of one, boxes of the other. Integers only.

The kinds of lines in a family's table of tensors: which tensor of theirs holds a parameter of ours, and how.

Names of ours have "{l}" for the number of a layer, and so have theirs; "{e}" in theirs is the number of an expert.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from moefold.config.schema import ModelConfig

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""A slice of every dim, with start and stop."""


@dataclass(frozen=True)
class SliceMapping:
    """A box of one of our parameters, equal to a box of one tensor of theirs with its dims in another order.

    Attributes:
        name: our name.
        start: first index of the box, for each of our dims.
        size: size of the box, for each of our dims.
        hf_name: their name.
        hf_start: first index of the box, for each of their dims.
        hf_step: distance of neighbours, for each of their dims.
        dims: for each of our dims the dim of theirs that runs along it; None for one that theirs lacks (of size 1).
    """

    name: str
    start: Shape
    size: Shape
    hf_name: str
    hf_start: Shape
    hf_step: Shape
    dims: tuple[int | None, ...]

    def intersect(self, region: Region) -> "SliceMapping | None":
        """The part of the piece that lies in a region of our tensor; None if they do not meet."""
        start = [max(s, r.start) for s, r in zip(self.start, region, strict=True)]
        stop = [min(s + n, r.stop) for s, n, r in zip(self.start, self.size, region, strict=True)]
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(n <= 0 for n in size):
            return None
        their_start = list(self.hf_start)
        for ours, theirs in enumerate(self.dims):
            if theirs is not None:
                their_start[theirs] += (start[ours] - self.start[ours]) * self.hf_step[theirs]
        return SliceMapping(self.name, tuple(start), size, self.hf_name, tuple(their_start), self.hf_step, self.dims)

    def intersect_hf_rows(self, start: int, stop: int) -> "SliceMapping | None":
        """The part of the piece that lies in some rows (indices of the first dim) of theirs; None if there is none."""
        first, step, dim = self.hf_start[0], self.hf_step[0], self.dims.index(0)
        begin, end = (max(0, -(-(row - first) // step)) for row in (start, stop))
        region = [slice(a, a + n) for a, n in zip(self.start, self.size, strict=True)]
        region[dim] = slice(self.start[dim] + begin, self.start[dim] + end)
        return self.intersect(tuple(region))

    def region(self) -> Region:
        """The box in our tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def hf_region(self) -> Region:
        """The box in their tensor, with steps."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(
            slice(start, start + (sizes[dim] - 1) * step + 1, step)
            for dim, (start, step) in enumerate(zip(self.hf_start, self.hf_step, strict=True))
        )

    def permutation(self) -> tuple[int, ...]:
        """Their dims in our order."""
        return tuple(dim for dim in self.dims if dim is not None)

    def inverse_permutation(self) -> tuple[int, ...]:
        """The place of each of their dims among those of `permutation`."""
        order = self.permutation()
        return tuple(order.index(dim) for dim in range(len(order)))

    def hf_size(self) -> Shape:
        """Size of the box in the order of their dims."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(sizes[dim] for dim in range(len(self.hf_start)))


@dataclass(frozen=True)
class StateDictMapping:
    """Every piece of a model, by our names and by theirs."""

    by_name: Mapping[str, tuple[SliceMapping, ...]]
    by_hf_name: Mapping[str, tuple[SliceMapping, ...]]
    shapes: Mapping[str, Shape]
    hf_shapes: Mapping[str, Shape]


def build_mapping(slices: Iterable[SliceMapping], shapes: Mapping[str, Shape]) -> StateDictMapping:
    """Collect pieces, which must fill every tensor of both sides exactly once."""
    by_ours: dict[str, list[SliceMapping]] = {name: [] for name in shapes}
    by_theirs: dict[str, list[SliceMapping]] = {}
    for piece in slices:
        by_ours[piece.name].append(piece)
        by_theirs.setdefault(piece.hf_name, []).append(piece)
    their_shapes = {name: _bounding_shape(parts) for name, parts in by_theirs.items()}
    for name, parts, shape in (*_with_shapes(by_ours, shapes), *_with_shapes(by_theirs, their_shapes)):
        assert sum(math.prod(piece.size) for piece in parts) == math.prod(shape), (name, shape)
    return StateDictMapping(
        {name: tuple(parts) for name, parts in by_ours.items()},
        {name: tuple(parts) for name, parts in by_theirs.items()},
        dict(shapes),
        their_shapes,
    )


def full_region(shape: Shape) -> Region:
    """The region that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def _bounding_shape(slices: list[SliceMapping]) -> Shape:
    ends = [[s.stop for s in piece.hf_region()] for piece in slices]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _with_shapes(
    groups: Mapping[str, list[SliceMapping]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, list[SliceMapping], Shape]]:
    for name, parts in groups.items():
        yield name, parts, shapes[name]


class TensorRule(Protocol):
    """What a table has for one of our parameters."""

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """The pieces of one parameter.

        Args:
            param_name: its name in the whole model.
            shape: its shape.
            layer: number of its layer, "" outside the layers.
            model: the sizes.
        """
        ...


@dataclass(frozen=True)
class RenamedTensor:
    """The same tensor under another name."""

    hf_name: str

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """One piece."""
        zeros, ones = (0,) * len(shape), (1,) * len(shape)
        yield SliceMapping(
            param_name, zeros, shape, _fill_in_layer(self.hf_name, layer), zeros, ones, tuple(range(len(shape)))
        )


@dataclass(frozen=True)
class PerExpertTensors:
    """A tensor for each expert, the transpose of ours: [E, H, F] of [F, H]s, or [E, F, H] of [H, F]s."""

    hf_name: str

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """One piece for each expert."""
        experts, first, second = shape
        for e in range(experts):
            name = _fill_in_layer(self.hf_name, layer).replace("{e}", str(e))
            yield SliceMapping(param_name, (e, 0, 0), (1, first, second), name, (0, 0), (1, 1), (None, 1, 0))


@dataclass(frozen=True)
class StackedExperts:
    """One tensor for all experts, each transposed.

    Attributes:
        hf_name: the name, without an expert.
        part: which block of their second dim is ours: 0 is the gate of a fused gate and up, 1 the up.
    """

    hf_name: str
    part: int = 0

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """One piece."""
        start = (0, self.part * shape[2], 0)
        yield SliceMapping(
            param_name, (0, 0, 0), shape, _fill_in_layer(self.hf_name, layer), start, (1, 1, 1), (0, 2, 1)
        )


@dataclass(frozen=True)
class InterleavedTensor:
    """Every second of the last dim of theirs, the dims in the same order (gpt-oss: gates and ups in turn).

    Attributes:
        hf_name: the name.
        part: 0 for the first of each pair, 1 for the second.
    """

    hf_name: str
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """One piece."""
        zeros, ones, dims = (0,) * len(shape), (1,) * (len(shape) - 1), tuple(range(len(shape)))
        start, step = (*zeros[:-1], self.part), (*ones, 2)
        yield SliceMapping(param_name, zeros, shape, _fill_in_layer(self.hf_name, layer), start, step, dims)


def _fill_in_layer(template: str, layer: str) -> str:
    return template.replace("{l}", layer)
