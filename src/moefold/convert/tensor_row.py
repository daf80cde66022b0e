"""The kinds of lines in a family's table of tensors: which tensor of theirs holds a parameter of ours, and how.

Names of ours have "{l}" for the number of a layer, and so have theirs; "{e}" in theirs is the number of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from moefold.config.schema import ModelConfig
from moefold.convert.piece import Shape, SliceMapping


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
