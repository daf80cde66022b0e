"""The ranks that hold the tokens of one micro-batch between them, as far as the maths must know."""

from typing import Protocol

from torch import Tensor


class TokenScope(Protocol):
    """cp x tp ranks with equally many tokens each. Nothing here has a gradient."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def rank(self) -> int:
        """My place among them, which is the place of my rows in `gather`."""
        ...

    @property
    def positions(self) -> Tensor | None:
        """Positions of my tokens in their sample, int64 [S/(cp*tp)]; None stands for 0, 1, 2 and so on."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks along dim 0."""
        ...


class LocalScope:
    """One rank holds whole micro-batches."""

    size = 1
    rank = 0
    positions = None

    def sum(self, x: Tensor) -> Tensor:
        """Nothing to add."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Nothing to concatenate."""
        return x
