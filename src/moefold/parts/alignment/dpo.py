"""Direct preference optimization (DPO, arXiv:2305.18290)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moefold.config.field import POSITIVE
from moefold.config.groups.alignment import (
    OraclePairs,
    PairScores,
    PreferenceFormula,
    PreferencePart,
    record_pair_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DirectPreference(PreferencePart):
    """The logistic loss of the difference of the scores."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards; the higher, the closer to the reference."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return -log sigmoid(beta * (chosen - rejected))."""
        from torch.nn.functional import logsigmoid

        record_pair_rewards(scores, self.beta)
        return -logsigmoid(self.beta * (scores.first - scores.second))

    def formula(self) -> PreferenceFormula:
        """Return log(1 + exp(-beta * difference))."""

        def loss(pairs: OraclePairs) -> "Tensor":
            difference = pairs.first - pairs.seconds[pairs.pair]
            return (1 + (-self.beta * difference).exp()).log()

        return PreferenceFormula(loss)
