"""The kinds of lines in a family's table of tensors: which tensor of theirs holds a parameter of ours, and how.

Names of ours have "{l}" for the number of a layer, and so have theirs; "{e}" in theirs is the number of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from moefold.config.schema import ModelConfig
from moefold.convert.piece import Piece, Shape


class Row(Protocol):
    """What a table has for one of our parameters."""

    def pieces(self, ours: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[Piece]:
        """The pieces of one parameter.

        Args:
            ours: its name in the whole model.
            shape: its shape.
            layer: number of its layer, "" outside the layers.
            model: the sizes.
        """
        ...


@dataclass(frozen=True)
class Equal:
    """The same tensor under another name."""

    theirs: str

    def pieces(self, ours: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[Piece]:
        """One piece."""
        zeros, ones = (0,) * len(shape), (1,) * len(shape)
        yield Piece(ours, zeros, shape, _name(self.theirs, layer), zeros, ones, tuple(range(len(shape))))


@dataclass(frozen=True)
class EachExpert:
    """A tensor for each expert, the transpose of ours: [E, H, F] of [F, H]s, or [E, F, H] of [H, F]s."""

    theirs: str

    def pieces(self, ours: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[Piece]:
        """One piece for each expert."""
        experts, first, second = shape
        for e in range(experts):
            name = _name(self.theirs, layer).replace("{e}", str(e))
            yield Piece(ours, (e, 0, 0), (1, first, second), name, (0, 0), (1, 1), (None, 1, 0))


@dataclass(frozen=True)
class AllExperts:
    """One tensor for all experts, each transposed.

    Attributes:
        theirs: the name, without an expert.
        part: which block of their second dim is ours: 0 is the gate of a fused gate and up, 1 the up.
    """

    theirs: str
    part: int = 0

    def pieces(self, ours: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[Piece]:
        """One piece."""
        start = (0, self.part * shape[2], 0)
        yield Piece(ours, (0, 0, 0), shape, _name(self.theirs, layer), start, (1, 1, 1), (0, 2, 1))


@dataclass(frozen=True)
class Interleaved:
    """Every second of the last dim of theirs, the dims in the same order (gpt-oss: gates and ups in turn).

    Attributes:
        theirs: the name.
        part: 0 for the first of each pair, 1 for the second.
    """

    theirs: str
    part: int

    def pieces(self, ours: str, shape: Shape, layer: str, model: ModelConfig) -> Iterator[Piece]:
        """One piece."""
        zeros, ones, dims = (0,) * len(shape), (1,) * (len(shape) - 1), tuple(range(len(shape)))
        start, step = (*zeros[:-1], self.part), (*ones, 2)
        yield Piece(ours, zeros, shape, _name(self.theirs, layer), start, step, dims)


def _name(template: str, layer: str) -> str:
    return template.replace("{l}", layer)
