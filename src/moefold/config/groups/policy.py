"""Loss of reinforcement learning: advantages, objective of a token, correction of the sampler, and the KL penalty."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.base.field import POSITIVE, SHARE, Bound, at_least
from moefold.config.base.part import Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Rewards = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Sampled tokens of a micro-batch, [B, S/cp] each. Tokens with `is_trained` False may have any value."""

    log_probs: "Tensor"
    """Log-probabilities of the policy in training, with gradient."""
    log_ratio: "Tensor | None"
    """`log_probs` minus the log-probabilities of the policy that sampled, 0 for tokens that are not sampled. None:
    absent."""
    advantages: "Tensor"
    is_trained: "Tensor"
    """Tokens with a nonzero weight, bool."""
    geometric_mean: Callable[["Tensor"], "Tensor"]
    """Mean over the tokens of each token's rollout, of an objective that `reads_rollouts`."""
    record_mean: Callable[[str, "Tensor"], None]
    """Record a value of each token for a metric of `mean_metrics`."""

    @cached_property
    def ratio(self) -> "Tensor":
        """Return the ratio of the policy to the sampler."""
        assert self.log_ratio is not None, "reads_sampler"
        return self.log_ratio.exp()


@dataclass(frozen=True, kw_only=True)
class OracleToken:
    """One sampled token in float64, for the oracle."""

    log_probs: "Tensor"
    """Log-probabilities of the policy for the tokens of its row, [S]."""
    old: "Tensor"
    """Log-probabilities of the policy that sampled."""
    advantage: "Tensor"
    position: int
    of_rollout: Callable[["Tensor"], "Tensor"]
    """Returns the values of its rollout from the values of its row."""


@dataclass(frozen=True, kw_only=True)
class ObjectivePart(Part):
    """Loss of sampled tokens, before weights, correction and the KL penalty."""

    group: ClassVar[str] = "objective"
    key: ClassVar[str] = "rl.objective"
    reads_sampler: ClassVar[bool] = True
    """True if the objective compares the policy with the sampler, and so may train on rollouts of older weights."""
    reads_rollouts: ClassVar[bool] = False
    """True if the objective depends on the assignment of tokens to rollouts."""
    mean_metrics: ClassVar[tuple[str, ...]] = ("clipped",)
    """Recorded metrics, which are means over trained tokens."""

    def log_ratio(self, tokens: PolicyTokens) -> "Tensor | None":
        """Return the logarithm of the ratio of the objective, [B, S/cp]. Its maximum is the metric `ratio_max`."""
        return tokens.log_ratio

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return the loss of each token, [B, S/cp]. `tokens.log_ratio` is `log_ratio`."""
        raise NotImplementedError

    def formula(self) -> Callable[[OracleToken], "Tensor"] | None:
        """Return the loss of one token, 0-dim, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class ClippedPart(ObjectivePart):
    """Objective with a range of the ratio."""

    clip_low: Annotated[float, SHARE] = 0.2
    """Lower clip range of the ratio, below 1."""
    clip_high: Annotated[float, POSITIVE] = 0.28
    """Upper clip range of the ratio, above 1 (DAPO's clip-higher, arXiv:2503.14476)."""


def clipped_loss(tokens: PolicyTokens, low: float, high: float) -> "Tensor":
    """Return -min(r * A, clamp(r, 1 - low, 1 + high) * A), and record the share of clipped tokens."""
    ratio = tokens.ratio
    gain = ratio * tokens.advantages
    clamped_gain = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    tokens.record_mean("clipped", (clamped_gain < gain).double())
    return -gain.minimum(clamped_gain)


CorrectionFormula = Callable[["Tensor", Callable[["Tensor"], "Tensor"], int], float]
"""Factor of one token, given the differences of its row, trainer minus sampler, [S], a function from a row to the
values of the token's rollout, and its position."""


@dataclass(frozen=True, kw_only=True)
class CorrectionPart(Part):
    """Factor of a token's loss: c = exp(log-probability in training - in sampling), limited in some way."""

    group: ClassVar[str] = "correction"
    key: ClassVar[str] = "rl.correction"
    corrects: ClassVar[bool] = True
    """True if there is a factor."""
    reads_rollouts: ClassVar[bool] = False
    """True if the limit depends on the assignment of tokens to rollouts."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token, [B, S/cp], without gradient.

        Args:
            factor: exp(difference).
            difference: log-probabilities in the trainer minus log-probabilities in the sampler, [B, S/cp].
            mean: mean over the tokens of each token's rollout, [B, S/cp] -> same.
        """
        raise NotImplementedError

    def formula(self) -> CorrectionFormula | None:
        """Return the factor of one token, or None if it has no formula."""
        return None


@dataclass(frozen=True, kw_only=True)
class BoundedCorrection(CorrectionPart):
    """Factor with bounds."""

    low: Annotated[float, Bound("must lie in [0, 1]", lambda bound: 0 <= bound <= 1)] = 0.0
    """Lower bound of the factor: 0.5 for mask in IcePop, 0.999 for sequence_mask in ProRL v2.1."""
    high: Annotated[float, at_least(1)] = 2.0
    """Upper bound of the factor: 5.0 for mask in IcePop, 1.002 for sequence_mask in ProRL v2.1."""


@dataclass(frozen=True, kw_only=True)
class KlPart(Part):
    """Penalty of each token (http://joschu.net/blog/kl-approx.html)."""

    group: ClassVar[str] = "kl"
    key: ClassVar[str] = "rl.kl_kind"

    def penalty(self, difference: "Tensor") -> "Tensor":
        """Return the penalty of each token from log(reference / policy), [B, S/cp] -> same."""
        raise NotImplementedError

    def formula(self) -> Callable[["Tensor"], "Tensor"] | None:
        """Return the penalty of one token from the ratio reference / policy, 0-dim, or None if it has no formula."""
        return None


EPS = 1e-4
"""Added to a standard deviation, as in TRL's GRPOTrainer."""


@dataclass(frozen=True, kw_only=True)
class AdvantagePart(Part):
    """Advantages of a batch. Rewards are [P, G] for P prompts with G rollouts each. NaN: no reward."""

    group: ClassVar[str] = "advantage"
    key: ClassVar[str] = "rl.advantage"
    changes_maths: ClassVar[bool] = False
    """False: `moefold verify` compares the loss for given advantages. Tests compare these with TRL."""

    def advantages(self, rewards: "Rewards") -> "Rewards":
        """Return the advantage of each rollout, [P, G], NaN without a reward."""
        raise NotImplementedError


def centred(rewards: "Rewards") -> "Rewards":
    """Return the reward minus the mean of its group, [P, G]."""
    import numpy as np

    mean = np.nansum(rewards, axis=1, keepdims=True) / np.maximum(reward_counts(rewards), 1)
    centred_rewards: Rewards = rewards - mean
    return centred_rewards


def reward_counts(rewards: "Rewards") -> "NDArray[np.int64]":
    """Return the number of rewards of each group, [P, 1]."""
    import numpy as np

    counts: NDArray[np.int64] = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return counts
