"""Norms of inputs and of outputs (sandwich norm)."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.block import ResidualFormula, ResidualPart


@dataclass(frozen=True, kw_only=True)
class SandwichNorm(ResidualPart):
    """Normalise the inputs and the outputs of attention and of the feed-forward network."""

    norms_output: ClassVar[bool] = True

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * norm(f(norm(x)))."""
        return ResidualFormula(lambda x, norm: norm(x), lambda y, norm: self.multiplier * norm(y))
