"""Mapping between our parameters and the tensors of Hugging Face (HF) folders: slices of one equal slices of the other.

Integers only. A family's table has one rule per parameter. Our names and HF names use "{l}" for the layer number; HF
names use "{e}" for the expert number.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from moefold.config.model import ModelConfig

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""One slice per dim, with start and stop."""


@dataclass(frozen=True)
class SliceMapping:
    """A slice of one of our parameters that equals a slice of one HF tensor, with permuted dims.

    Attributes:
        name: name of our parameter.
        start: first index of the slice, for each of our dims.
        size: size of the slice, for each of our dims.
        hf_name: name of the HF tensor.
        hf_start: first index of the slice, for each HF dim.
        hf_step: step of the slice, for each HF dim.
        dims: for each of our dims the matching HF dim; None for a dim of size 1 that the HF tensor lacks. HF dims that
            are not listed have size 1.
    """

    name: str
    start: Shape
    size: Shape
    hf_name: str
    hf_start: Shape
    hf_step: Shape
    dims: tuple[int | None, ...]

    def intersect(self, region: Region) -> "SliceMapping | None":
        """Return the part of the slice in a region of our parameter; None if they do not intersect."""
        start = [max(s, r.start) for s, r in zip(self.start, region, strict=True)]
        stop = [min(s + n, r.stop) for s, n, r in zip(self.start, self.size, region, strict=True)]
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(n <= 0 for n in size):
            return None
        hf_start = list(self.hf_start)
        for dim, hf_dim in enumerate(self.dims):
            if hf_dim is not None:
                hf_start[hf_dim] += (start[dim] - self.start[dim]) * self.hf_step[hf_dim]
        return SliceMapping(self.name, tuple(start), size, self.hf_name, tuple(hf_start), self.hf_step, self.dims)

    def intersect_hf_rows(self, start: int, stop: int) -> "SliceMapping | None":
        """Return the part of the slice in some rows (first dim) of the HF tensor; None if there is none."""
        if 0 not in self.dims:
            return self if start <= 0 < stop else None
        first = self.hf_start[0]
        step = self.hf_step[0]
        dim = self.dims.index(0)
        begin, end = (max(0, -(-(row - first) // step)) for row in (start, stop))
        region = [slice(a, a + n) for a, n in zip(self.start, self.size, strict=True)]
        region[dim] = slice(self.start[dim] + begin, self.start[dim] + end)
        return self.intersect(tuple(region))

    def region(self) -> Region:
        """Return the slice of our parameter."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def hf_region(self) -> Region:
        """Return the slice of the HF tensor, with steps."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(
            slice(start, start + (sizes.get(dim, 1) - 1) * step + 1, step)
            for dim, (start, step) in enumerate(zip(self.hf_start, self.hf_step, strict=True))
        )

    def permutation(self) -> tuple[int, ...]:
        """Return the HF dims in the order of our dims, after those that ours lack."""
        own = tuple(dim for dim in self.dims if dim is not None)
        return (*(dim for dim in range(len(self.hf_start)) if dim not in own), *own)

    def inverse_permutation(self) -> tuple[int, ...]:
        """Return the inverse of `permutation`."""
        order = self.permutation()
        return tuple(order.index(dim) for dim in range(len(order)))

    def hf_size(self) -> Shape:
        """Return the size of the slice in the order of the HF dims."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(sizes.get(dim, 1) for dim in range(len(self.hf_start)))

    def permuted_size(self) -> Shape:
        """Return the size of the slice in the order of `permutation`."""
        sizes = self.hf_size()
        return tuple(sizes[dim] for dim in self.permutation())


@dataclass(frozen=True)
class StateDictMapping:
    """All slice mappings of a model, by our names and by HF names."""

    by_name: Mapping[str, tuple[SliceMapping, ...]]
    by_hf_name: Mapping[str, tuple[SliceMapping, ...]]
    shapes: Mapping[str, Shape]
    hf_shapes: Mapping[str, Shape]


def build_mapping(slices: Iterable[SliceMapping], shapes: Mapping[str, Shape]) -> StateDictMapping:
    """Collect slice mappings, which must cover every tensor of both sides exactly once."""
    by_name: dict[str, list[SliceMapping]] = {name: [] for name in shapes}
    by_hf_name: dict[str, list[SliceMapping]] = {}
    for piece in slices:
        by_name[piece.name].append(piece)
        by_hf_name.setdefault(piece.hf_name, []).append(piece)
    hf_shapes = {name: _bounding_shape(parts) for name, parts in by_hf_name.items()}
    for name, parts, shape in (*_with_shapes(by_name, shapes), *_with_shapes(by_hf_name, hf_shapes)):
        assert sum(math.prod(piece.size) for piece in parts) == math.prod(shape), (name, shape)
    return StateDictMapping(
        {name: tuple(parts) for name, parts in by_name.items()},
        {name: tuple(parts) for name, parts in by_hf_name.items()},
        dict(shapes),
        hf_shapes,
    )


def _bounding_shape(slices: list[SliceMapping]) -> Shape:
    ends = [[s.stop for s in piece.hf_region()] for piece in slices]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _with_shapes(
    groups: Mapping[str, list[SliceMapping]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, list[SliceMapping], Shape]]:
    for name, parts in groups.items():
        yield name, parts, shapes[name]


class TensorRule(Protocol):
    """Rule of a family's table: maps one of our parameters to HF tensors."""

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield the slice mappings of one parameter.

        Args:
            param_name: name of the parameter in the whole model.
            shape: its shape.
            layer: its layer number, "" outside the layers.
            model: the model config.
        """
        ...


@dataclass(frozen=True)
class RenamedTensor:
    """HF tensor that equals our parameter under another name."""

    hf_name: str

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole tensor."""
        zeros = (0,) * len(shape)
        ones = (1,) * len(shape)
        yield SliceMapping(
            param_name, zeros, shape, fill_in_layer(self.hf_name, layer), zeros, ones, tuple(range(len(shape)))
        )


@dataclass(frozen=True)
class RowVector:
    """HF matrix of one row that equals our vector."""

    hf_name: str

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole tensor."""
        yield SliceMapping(param_name, (0,), shape, fill_in_layer(self.hf_name, layer), (0, 0), (1, 1), (1,))


@dataclass(frozen=True)
class FusedRows:
    """Block of rows of an HF matrix or vector that fuses several of ours of one shape (Granite: gate and up).

    Attributes:
        hf_name: its name.
        part: our block.
    """

    hf_name: str
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole parameter."""
        dims = range(len(shape))
        start = (self.part * shape[0], *(0 for _ in shape[1:]))
        zeros = tuple(0 for _ in dims)
        steps = tuple(1 for _ in dims)
        yield SliceMapping(param_name, zeros, shape, fill_in_layer(self.hf_name, layer), start, steps, tuple(dims))


@dataclass(frozen=True)
class PerExpertTensors:
    """One HF tensor per expert, transposed: [F, H] tensors for our [E, H, F], or [H, F] tensors for [E, F, H]."""

    hf_name: str

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping per expert."""
        experts, first, second = shape
        for e in range(experts):
            name = fill_in_layer(self.hf_name, layer).replace("{e}", str(e))
            yield SliceMapping(param_name, (e, 0, 0), (1, first, second), name, (0, 0), (1, 1), (None, 1, 0))


@dataclass(frozen=True)
class StackedExperts:
    """One HF tensor for all experts, each transposed.

    Attributes:
        hf_name: its name, without an expert number.
        part: our block of its second dim: of a fused gate and up projection, 0 is the gate, 1 is up.
    """

    hf_name: str
    part: int = 0

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of all experts."""
        start = (0, self.part * shape[2], 0)
        yield SliceMapping(
            param_name, (0, 0, 0), shape, fill_in_layer(self.hf_name, layer), start, (1, 1, 1), (0, 2, 1)
        )


@dataclass(frozen=True)
class FusedColumns:
    """Block of the last dim of an HF tensor that fuses several of our tensors of one shape, dims in the same order.

    Attributes:
        hf_name: its name.
        part: our block: of a fused gate and up projection, 0 is the gate, 1 is up.
    """

    hf_name: str
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole parameter."""
        zeros = (0,) * len(shape)
        start = (*zeros[:-1], self.part * shape[-1])
        ones = (1,) * len(shape)
        dims = tuple(range(len(shape)))
        yield SliceMapping(param_name, zeros, shape, fill_in_layer(self.hf_name, layer), start, ones, dims)


@dataclass(frozen=True)
class InterleavedTensor:
    """Every second index of the last dim of an HF tensor, dims in the same order (gpt-oss: interleaved gate and up).

    Attributes:
        hf_name: its name.
        part: 0 for the first of each pair, 1 for the second.
    """

    hf_name: str
    part: int

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping with step 2."""
        zeros = (0,) * len(shape)
        ones = (1,) * (len(shape) - 1)
        dims = tuple(range(len(shape)))
        start = (*zeros[:-1], self.part)
        step = (*ones, 2)
        yield SliceMapping(param_name, zeros, shape, fill_in_layer(self.hf_name, layer), start, step, dims)


def fill_in_layer(template: str, layer: str) -> str:
    """Return an HF name for a layer; "{pair}" and "{half}" are the number of a pair of our layers, and that in it."""
    if "{pair}" not in template:
        return template.replace("{l}", layer)
    return template.replace("{pair}", str(int(layer) // 2)).replace("{half}", str(int(layer) % 2))
