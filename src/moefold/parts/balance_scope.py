"""Tokens over which the load-balancing loss counts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.groups.router import BalanceFormula, BalanceScopePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MicroBatchBalance(BalanceScopePart, kind="micro_batch"):
    """All tokens of a micro-batch together (arXiv:2101.03961)."""

    def formula(self) -> BalanceFormula:
        """Return a pair for each micro-batch."""
        return lambda batches, last, size: [
            (batch.tokens_per_expert().sum(0), batch.scores[batch.is_token].sum(0)) for batch in batches
        ]


@dataclass(frozen=True, kw_only=True)
class SequenceBalance(BalanceScopePart, kind="sequence"):
    """The tokens of each sample by themselves."""

    is_per_sample: ClassVar[bool] = True

    def formula(self) -> BalanceFormula:
        """Return a pair for each sample."""
        return lambda batches, last, size: [
            (counts, batch.scores[sample, batch.is_token[sample]].sum(0))
            for batch in batches
            for sample, counts in enumerate(batch.tokens_per_expert())
        ]


@dataclass(frozen=True, kw_only=True)
class GlobalBatchBalance(BalanceScopePart, kind="global_batch"):
    """The tokens of all micro-batches of the step so far, on all ranks of dp (arXiv:2501.11873). It depends on dp."""

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


@dataclass(frozen=True, kw_only=True)
class LastGlobalBatchBalance(BalanceScopePart, kind="last_global_batch"):
    """The tokens of the global batch of the last step, for any dp. Before the first step it is an even load."""

    keeps_counts: ClassVar[bool] = True

    def formula(self) -> BalanceFormula:
        """Return one pair for all tokens of the step."""

        def pairs(batches: Any, last: "Tensor | None", size: int) -> "list[tuple[Tensor, Tensor]]":
            assert last is not None, "keeps_counts"
            counts = last.double() if last.any() else last.double() + 1
            return [(counts, sum(batch.scores[batch.is_token].sum(0) for batch in batches))]

        return pairs
