"""Mapping between slices of our parameters and of the tensors in Hugging Face (HF) folders.

The module only computes with integers. A family's table has one rule per parameter. Our names and HF names use "{l}"
for the layer number. HF names use "{e}" for the expert number.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from moefold.config.model import ModelConfig

Shape = tuple[int, ...]
Region = tuple[slice, ...]
"""One slice per dim, with start and stop."""


@dataclass(frozen=True)
class SliceMapping:
    """Mapping of a slice of one of our parameters to an equal slice of an HF tensor, with permuted dims.

    Attributes:
        name: name of our parameter.
        start: first index of the slice, for each of our dims.
        size: size of the slice, for each of our dims.
        hf_name: name of the HF tensor.
        hf_start: first index of the slice, for each HF dim.
        hf_step: step of the slice, for each HF dim.
        dims: for each of our dims the matching HF dim, or None for a dim of size 1 that the HF tensor lacks. HF dims
            that are not listed have size 1.
    """

    name: str
    start: Shape
    size: Shape
    hf_name: str
    hf_start: Shape
    hf_step: Shape
    dims: tuple[int | None, ...]

    def intersect(self, region: Region) -> "SliceMapping | None":
        """Return the part of the slice in a region of our parameter, or None if they do not intersect."""
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
        """Return the part of the slice in some rows (first dim) of the HF tensor, or None if it is empty."""
        if 0 not in self.dims:
            return self if start <= 0 < stop else None
        first = self.hf_start[0]
        step = self.hf_step[0]
        dim = self.dims.index(0)
        first_row, stop_row = (max(0, -(-(row - first) // step)) for row in (start, stop))
        region = [slice(a, a + n) for a, n in zip(self.start, self.size, strict=True)]
        region[dim] = slice(self.start[dim] + first_row, self.start[dim] + stop_row)
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
        """Return the HF dims in the order of our dims, after the HF dims without a counterpart."""
        mapped = tuple(dim for dim in self.dims if dim is not None)
        return (*(dim for dim in range(len(self.hf_start)) if dim not in mapped), *mapped)

    def inverse_permutation(self) -> tuple[int, ...]:
        """Return the inverse of `permutation`."""
        order = self.permutation()
        return tuple(order.index(dim) for dim in range(len(order)))

    def permuted_size(self) -> Shape:
        """Return the size of the slice in the order of `permutation`."""
        sizes = dict(zip(self.dims, self.size, strict=True))
        return tuple(sizes.get(dim, 1) for dim in self.permutation())


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
    hf_shapes = {name: _bounding_shape(pieces) for name, pieces in by_hf_name.items()}
    for name, pieces, shape in (*_with_shapes(by_name, shapes), *_with_shapes(by_hf_name, hf_shapes)):
        assert sum(math.prod(piece.size) for piece in pieces) == math.prod(shape), (name, shape)
    return StateDictMapping(
        {name: tuple(pieces) for name, pieces in by_name.items()},
        {name: tuple(pieces) for name, pieces in by_hf_name.items()},
        dict(shapes),
        hf_shapes,
    )


def _bounding_shape(slices: list[SliceMapping]) -> Shape:
    ends = [[s.stop for s in piece.hf_region()] for piece in slices]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _with_shapes(
    groups: Mapping[str, list[SliceMapping]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, list[SliceMapping], Shape]]:
    for name, pieces in groups.items():
        yield name, pieces, shapes[name]


class TensorRule(Protocol):
    """Rule of a family's table: maps one of our parameters to HF tensors."""

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield the slice mappings of a parameter, by its name in the whole model. `layer` is "" outside of layers."""
        ...


@dataclass(frozen=True)
class TensorBlock:
    """Our parameter as a block of an HF tensor, by default the whole tensor with the same dims.

    Attributes:
        hf_name: name of the HF tensor.
        part: number of our block in a tensor that fuses several parameters of one shape: 0 for gate, 1 for up.
        axis: HF dim of the fusion.
        step: 1 for consecutive parameters, else the number of parameters whose indices alternate.
        dims: for each of our dims the HF dim. Empty means the same dims. Other HF dims have size 1.
        num_dims: number of HF dims, if the last dims are not in `dims`.
    """

    hf_name: str
    part: int = 0
    axis: int = 0
    step: int = 1
    dims: tuple[int, ...] = ()
    num_dims: int = 0

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping of the whole parameter."""
        dims = self.dims or tuple(range(len(shape)))
        start = [0] * max(self.num_dims, *(dim + 1 for dim in dims))
        step = [1] * len(start)
        if self.part or self.step > 1:
            axis = self.axis % len(start)
            start[axis] = self.part if self.step > 1 else self.part * shape[dims.index(axis)]
            step[axis] = self.step
        name = fill_in_layer(self.hf_name, layer)
        yield SliceMapping(param_name, (0,) * len(shape), shape, name, tuple(start), tuple(step), dims)


RowGroups = Callable[[ModelConfig], tuple[int, tuple[int, ...]]]
"""Returns the number of groups of rows of an HF tensor, and the rows of each of our parameters in a group."""


@dataclass(frozen=True)
class GroupedRows:
    """Rows of an HF tensor that fuses several of our matrices by groups: each group has rows of each matrix.

    Attributes:
        hf_name: name of the HF tensor.
        groups: groups of a model.
        part: number of our matrix.
        num_dims: number of HF dims: bias 1, matrix 2, convolution [.., 1, K] 3.
    """

    hf_name: str
    groups: RowGroups
    part: int
    num_dims: int = 2

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield one slice mapping per group."""
        count, widths = self.groups(model)
        size = widths[self.part]
        offset = sum(widths[: self.part])
        hf_name = fill_in_layer(self.hf_name, layer)
        zeros = (0,) * (self.num_dims - 1)
        step = (1,) * self.num_dims
        columns = shape[1:]
        dims = (0, *(self.num_dims - 1 for _ in columns))
        for group in range(count):
            start = (group * sum(widths) + offset, *zeros)
            model_starts = (group * size, *(0 for _ in columns))
            yield SliceMapping(param_name, model_starts, (size, *columns), hf_name, start, step, dims)


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
class ByAttention:
    """Rule of a parameter that recurrent layers ('linear') and other layers have in different HF tensors."""

    recurrent: TensorRule
    softmax: TensorRule

    def slices(self, param_name: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[SliceMapping]:
        """Yield the slice mappings of the rule of the layer's kind."""
        rule = self.recurrent if model.all_layers[int(layer)].attention.is_recurrent else self.softmax
        return rule.slices(param_name, shape, layer, model)


def fill_in_layer(template: str, layer: str) -> str:
    """Return an HF name for a layer. "{pair}" is the number of a pair of our layers, "{half}" the number in it."""
    if "{pair}" not in template:
        return template.replace("{l}", layer)
    return template.replace("{pair}", str(int(layer) // 2)).replace("{half}", str(int(layer) % 2))
