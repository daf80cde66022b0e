"""Balance over the global batch, as far as the step has come (arXiv:2501.11873)."""

from dataclasses import dataclass
from typing import ClassVar

from moefold.config.groups.router import BalanceFormula, BalanceScopePart


@dataclass(frozen=True, kw_only=True)
class GlobalBatchBalance(BalanceScopePart):
    """The tokens of all micro-batches of the step so far, on all data-parallel ranks."""

    accumulates: ClassVar[bool] = True

    def formula(self) -> BalanceFormula:
        """Return a pair for each micro-batch, with the counts of all ranks' micro-batches up to it.

        dp rank d runs the micro-batches from d * size on, in lockstep with the other ranks.
        """
        return lambda batches, last, size: [
            (
                sum(other.tokens_per_expert().sum(0) for i, other in enumerate(batches) if i % size <= number % size),
                batch.scores[batch.is_token].sum(0),
            )
            for number, batch in enumerate(batches)
        ]
