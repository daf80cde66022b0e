"""Tokens over which the load-balancing loss counts the tokens of each expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor

BalanceFormula = Callable[[Any, "Tensor | None", int], "list[tuple[Tensor, Tensor]]"]
"""Pairs of counts and sums of scores, each [E], from the routed micro-batches of a global batch, the counts of the last
global batch, and the micro-batches of a data-parallel rank. A micro-batch has `scores` [B, S, E], `is_token` [B, S] and
`tokens_per_expert()` [B, E]."""


@dataclass(frozen=True, kw_only=True)
class BalanceScopePart(Part):
    """Tokens whose routing is balanced. The default is all tokens of a micro-batch."""

    group: ClassVar[str] = "balance_scope"
    key: ClassVar[str] = "moe.aux_kind"
    is_per_sample: ClassVar[bool] = False
    """Whether each sample is balanced by itself."""
    accumulates: ClassVar[bool] = False
    """Whether the counts of the micro-batches of a step add up over all data-parallel ranks, as far as the step has
    come: the loss then depends on dp."""
    keeps_counts: ClassVar[bool] = False
    """Whether the counts are those that the last step ended with; they are saved in checkpoints."""

    @property
    def is_global(self) -> bool:
        """Return whether the counts are over global batches."""
        return self.accumulates or self.keeps_counts

    def formula(self) -> BalanceFormula | None:
        """Return the pairs of counts and scores in float64; None: it has no formula."""
        return None
