"""Identity preference optimization (IPO, arXiv:2310.12036), with TRL's normalisation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

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
class IdentityPreference(PreferencePart):
    """The squared distance of the difference of the scores from 1 / (2 beta)."""

    is_per_token: ClassVar[bool] = True
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards; the higher, the closer to the reference."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return (chosen - rejected - 1 / (2 beta))**2."""
        record_pair_rewards(scores, self.beta)
        return (scores.first - scores.second - 1 / (2 * self.beta)).square()

    def formula(self) -> PreferenceFormula:
        """Return the square."""

        def loss(pairs: OraclePairs) -> "Tensor":
            difference = pairs.first - pairs.seconds[pairs.pair]
            return (difference - 0.5 / self.beta) ** 2

        return PreferenceFormula(loss, is_per_token=True)
