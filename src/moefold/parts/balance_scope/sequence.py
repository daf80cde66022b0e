"""Balance over each sample."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.router import BalanceFormula, BalanceScopePart


@dataclass(frozen=True, kw_only=True)
class SequenceBalance(BalanceScopePart):
    """The tokens of each sample by themselves."""

    is_per_sample: ClassVar[bool] = True

    def formula(self) -> BalanceFormula:
        """Return a pair for each sample."""
        return lambda batches, last, size: [
            (counts, batch.scores[sample, batch.is_token[sample]].sum(0))
            for batch in batches
            for sample, counts in enumerate(batch.tokens_per_expert())
        ]
