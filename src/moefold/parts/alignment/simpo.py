"""Simple preference optimization (SimPO, arXiv:2405.14734)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.groups.alignment import (
    OraclePairs,
    PairScores,
    PreferenceFormula,
    PreferencePart,
    record_pair_rewards,
)
from moefold.config.part import FlatKey

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SimplePreference(PreferencePart):
    """The logistic loss of log-probabilities for each token with a margin, without a reference."""

    has_reference: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True
    beta: Annotated[float, FlatKey("align.beta")]
    gamma: Annotated[float, FlatKey("align.gamma")]

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
