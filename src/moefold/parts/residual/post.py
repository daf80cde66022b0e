"""Norms of outputs (OLMo 2)."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.block import ResidualFormula, ResidualPart


@dataclass(frozen=True, kw_only=True)
class PostNorm(ResidualPart):
    """Normalise the outputs of attention and of the feed-forward network."""

    norms_input: ClassVar[bool] = False
    norms_output: ClassVar[bool] = True

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * norm(f(x))."""
        return ResidualFormula(lambda x, norm: x, lambda y, norm: self.multiplier * norm(y))
