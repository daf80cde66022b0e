"""Kahneman-Tversky optimization (KTO, arXiv:2402.01306), of single completions with a label."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import POSITIVE
from moefold.config.groups.alignment import OraclePairs, PairScores, PreferenceFormula, PreferencePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KahnemanTversky(PreferencePart):
    """The sigmoid of the score over the mean score of completions of other prompts, at least 0, z.

    1 - sigmoid(beta * (score - z)) for a desirable completion, 1 - sigmoid(beta * (z - score)) for an undesirable one.
    """

    labelled: ClassVar[bool] = True
    mean_metrics: ClassVar[tuple[str, ...]] = ("desirable_reward", "undesirable_reward", "kl")
    beta: Annotated[float, POSITIVE] = 0.1
    """Scale of the implicit rewards; the higher, the closer to the reference."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of desirable completions."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """Factor of the loss of undesirable completions."""

    def pair_loss(self, scores: PairScores) -> "Tensor":
        """Return the loss of each completion; z has no gradient."""
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
