"""Balance by the counts of the last global batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.groups.router import BalanceFormula, BalanceScopePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LastGlobalBatchBalance(BalanceScopePart):
    """The tokens of the whole global batch of the last step; before the first step, an even load."""

    keeps_counts: ClassVar[bool] = True

    def formula(self) -> BalanceFormula:
        """Return one pair for all tokens of the step."""

        def pairs(batches: Any, last: "Tensor | None", size: int) -> "list[tuple[Tensor, Tensor]]":
            assert last is not None, "keeps_counts"
            counts = last.double() if last.any() else last.double() + 1
            return [(counts, sum(batch.scores[batch.is_token].sum(0) for batch in batches))]

        return pairs
