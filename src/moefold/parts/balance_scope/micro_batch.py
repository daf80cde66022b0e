"""Balance over a micro-batch (arXiv:2101.03961)."""

from dataclasses import dataclass

from moefold.config.groups.router import BalanceFormula, BalanceScopePart


@dataclass(frozen=True, kw_only=True)
class MicroBatchBalance(BalanceScopePart):
    """All tokens of a micro-batch together."""

    def formula(self) -> BalanceFormula:
        """Return a pair for each micro-batch."""
        return lambda batches, last, size: [
            (batch.tokens_per_expert().sum(0), batch.scores[batch.is_token].sum(0)) for batch in batches
        ]
