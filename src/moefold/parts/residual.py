"""Placements of the norms of the residual stream."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.block import ResidualFormula, ResidualPart


@dataclass(frozen=True, kw_only=True)
class PreNorm(ResidualPart, kind="pre"):
    """Normalise the inputs of attention and of the feed-forward network (Llama)."""

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * f(norm(x))."""
        return ResidualFormula(lambda x, norm: norm(x), lambda y, norm: self.multiplier * y)


@dataclass(frozen=True, kw_only=True)
class PostNorm(ResidualPart, kind="post"):
    """Normalise the outputs of attention and of the feed-forward network before they are added (OLMo 2)."""

    norms_input: ClassVar[bool] = False
    norms_output: ClassVar[bool] = True

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * norm(f(x))."""
        return ResidualFormula(lambda x, norm: x, lambda y, norm: self.multiplier * norm(y))


@dataclass(frozen=True, kw_only=True)
class SandwichNorm(ResidualPart, kind="both"):
    """Normalise the inputs and the outputs of attention and of the feed-forward network (sandwich norm)."""

    norms_output: ClassVar[bool] = True

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * norm(f(norm(x)))."""
        return ResidualFormula(lambda x, norm: norm(x), lambda y, norm: self.multiplier * norm(y))
