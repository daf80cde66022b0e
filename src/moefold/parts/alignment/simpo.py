"""Simple preference optimization (SimPO, arXiv:2405.14734)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import POSITIVE, at_least
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
class SimplePreference(PreferencePart):
    """The logistic loss of log-probabilities for each token with a margin, without a reference."""

    has_reference: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the log-probabilities; 2.0 to 2.5 is usual."""
    gamma: Annotated[float, at_least(0)] = 0.5
    """Target margin between the scaled log-probabilities of a pair."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return -log sigmoid(beta * (chosen - rejected) - gamma)."""
        from torch.nn.functional import logsigmoid

        record_pair_rewards(scores, self.beta)
        return -logsigmoid(self.beta * (scores.first - scores.second) - self.gamma)

    def formula(self) -> PreferenceFormula:
        """Return log(1 + exp(gamma - beta * difference))."""

        def loss(pairs: OraclePairs) -> "Tensor":
            difference = pairs.first - pairs.seconds[pairs.pair]
            return (1 + (self.gamma - self.beta * difference).exp()).log()

        return PreferenceFormula(loss, has_reference=False, is_per_token=True)
