"""Methods of offline alignment."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from moefold.config.base.field import POSITIVE, Bound, at_least
from moefold.config.groups.alignment import (
    AlignmentPart,
    OraclePairs,
    PairScores,
    PreferenceFormula,
    PreferencePart,
    RewardPromptPart,
    RewardSelectionPart,
    is_threshold,
    record_pair_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoAlignment(AlignmentPart, kind="none"):
    """The loss of the next tokens: no alignment."""

    changes_maths: ClassVar[bool] = False
    changes_training: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class RewardFilter(RewardSelectionPart, kind="filter"):
    """Training on the conversations whose reward reaches the threshold."""

    threshold: Annotated[
        float | str,
        Bound('must be a number, a quantile from "q0" to "q1" such as "q0.8", or "best"', is_threshold),
    ] = "best"
    """Rows that are kept. A number: rows with at least this reward. "q0.8": rows with at least that quantile of the
    data set's rewards. "best": the row with the highest reward of each prompt."""

    def select(self, rewards: Any, members: Any) -> Any:
        """Return the conversations above the threshold."""
        return rewards.filter(members, self.threshold)


@dataclass(frozen=True, kw_only=True)
class RewardWeight(RewardSelectionPart, kind="weight"):
    """The loss of each conversation times exp(reward / beta), up to a factor."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Temperature of the rewards."""
    weight_cap: Annotated[float, Bound("must be at least 1, or 0 (none)", lambda cap: cap >= 1 or cap == 0)] = 20.0
    """Maximum factor of a row's loss. The mean factor over the data set is 1 before the cap. 0: no maximum."""

    def select(self, rewards: Any, members: Any) -> Any:
        """Return all conversations with their weights."""
        return rewards.weight(members, self.beta, self.weight_cap)


@dataclass(frozen=True, kw_only=True)
class RewardCondition(RewardPromptPart, kind="condition"):
    """Prompts that name the reward of their answer (arXiv:2308.12050)."""


@dataclass(frozen=True, kw_only=True)
class DirectPreference(PreferencePart, kind="dpo"):
    """The logistic loss of the difference of the scores (DPO, arXiv:2305.18290)."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards. The higher, the closer to the reference."""

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


@dataclass(frozen=True, kw_only=True)
class IdentityPreference(PreferencePart, kind="ipo"):
    """The squared distance of the difference of the scores from 1 / (2 beta) (IPO, arXiv:2310.12036).

    Scores are divided by the number of tokens, as in TRL.
    """

    is_per_token: ClassVar[bool] = True
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards. The higher, the closer to the reference."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return (chosen - rejected - 1 / (2 beta))**2."""
        record_pair_rewards(scores, self.beta)
        return (scores.first - scores.second - 1 / (2 * self.beta)).square()

    def formula(self) -> PreferenceFormula:
        """Return the squared error of IPO in float64, for the oracle."""

        def loss(pairs: OraclePairs) -> "Tensor":
            difference = pairs.first - pairs.seconds[pairs.pair]
            return (difference - 0.5 / self.beta) ** 2

        return PreferenceFormula(loss, is_per_token=True)


@dataclass(frozen=True, kw_only=True)
class SimplePreference(PreferencePart, kind="simpo"):
    """The logistic loss of log-probabilities for each token with a margin, without a reference.

    SimPO, arXiv:2405.14734.
    """

    has_reference: ClassVar[bool] = False
    is_per_token: ClassVar[bool] = True
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the log-probabilities. 2.0 to 2.5 is usual."""
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


@dataclass(frozen=True, kw_only=True)
class KahnemanTversky(PreferencePart, kind="kto"):
    """The sigmoid of the score over the mean score of completions of other prompts, at least 0, z (KTO).

    1 - sigmoid(beta * (score - z)) for a desirable completion, 1 - sigmoid(beta * (z - score)) for an undesirable one
    (arXiv:2402.01306).
    """

    labelled: ClassVar[bool] = True
    mean_metrics: ClassVar[tuple[str, ...]] = ("desirable_reward", "undesirable_reward", "kl")
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards. The higher, the closer to the reference."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of desirable completions."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of undesirable completions."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return the loss of each completion. z has no gradient."""
        import torch

        score = scores.first
        is_pair = scores.is_pair
        is_desirable = scores.is_desirable
        assert is_desirable is not None, "labelled"
        num_pairs = is_pair.sum(1, keepdim=True).clamp(min=1)
        kl = (scores.second.detach().where(is_pair, 0.0).sum(1, keepdim=True) / num_pairs).clamp(min=0)
        scores.record_mean("desirable_reward", self.beta * score, is_pair & is_desirable)
        scores.record_mean("undesirable_reward", self.beta * score, is_pair & ~is_desirable)
        scores.record_mean("kl", kl, is_pair.any(1, keepdim=True))
        sign = is_desirable.to(score.dtype) * 2 - 1
        # In the scores' dtype: Python numbers would make the factor float32.
        weight = torch.full_like(score, self.undesirable_weight).masked_fill(is_desirable, self.desirable_weight)
        return weight * (1 - torch.sigmoid(self.beta * sign * (score - kl)))

    def formula(self) -> PreferenceFormula:
        """Return the loss of one completion."""

        def loss(pairs: OraclePairs) -> "Tensor":
            z = max(0.0, sum(float(score.detach()) for score in pairs.seconds) / len(pairs.seconds))
            is_desirable = pairs.columns["is_desirable"][pairs.pair]
            weight = self.desirable_weight if is_desirable else self.undesirable_weight
            sign = 1 if is_desirable else -1
            return weight * (1 - 1 / (1 + (-sign * self.beta * (pairs.first - z)).exp()))

        return PreferenceFormula(loss)
