"""Norms of inputs (Llama)."""

from dataclasses import dataclass

from moefold.config.groups.block import ResidualFormula, ResidualPart


@dataclass(frozen=True, kw_only=True)
class PreNorm(ResidualPart):
    """Normalise the inputs of attention and of the feed-forward network."""

    def formula(self) -> ResidualFormula:
        """Return x + multiplier * f(norm(x))."""
        return ResidualFormula(lambda x, norm: norm(x), lambda y, norm: self.multiplier * y)
