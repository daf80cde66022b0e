"""Objectives of reinforcement learning."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.policy import ClippedPart, ObjectivePart, OracleToken, PolicyTokens, clipped_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyGradientObjective(ObjectivePart, kind="policy"):
    """REINFORCE: minus the advantage times the log-probability, for one update on a batch, where the ratio is 1."""

    reads_sampler: ClassVar[bool] = False
    mean_metrics: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -A * log_probs."""
        return -tokens.advantages * tokens.log_probs

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return -A * log_probs."""
        return lambda token: -token.advantage * token.log_probs[token.position]


@dataclass(frozen=True, kw_only=True)
class ClipObjective(ClippedPart, kind="clip"):
    """The lower of the gain and the gain with the ratio clipped, as a loss (PPO, arXiv:1707.06347; GRPO).

    The two bounds are separate (DAPO, arXiv:2503.14476).
    """

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -min(r * A, clamp(r) * A)."""
        return clipped_loss(tokens, self.clip_low, self.clip_high)

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return the loss by cases: a positive advantage is clipped from above, a negative advantage from below."""

        def loss(token: OracleToken) -> "Tensor":
            log_ratio = token.log_probs[token.position] - token.old[token.position]
            ratio = exp(float(log_ratio))
            low = 1 - self.clip_low
            high = 1 + self.clip_high
            if token.advantage > 0:
                return -high * token.advantage if ratio > high else -log_ratio.exp() * token.advantage
            return -low * token.advantage if ratio < low else -log_ratio.exp() * token.advantage

        return loss


@dataclass(frozen=True, kw_only=True)
class RolloutClipObjective(ClippedPart, kind="sequence"):
    """Clip the geometric mean of the ratios of a rollout (GSPO, arXiv:2507.18071).

    Each token has its own advantage and weight.
    """

    reads_rollouts: ClassVar[bool] = True

    def log_ratio(self, tokens: PolicyTokens) -> "Tensor | None":
        """Return the mean over the rollout of each token."""
        return None if tokens.log_ratio is None else tokens.geometric_mean(tokens.log_ratio)

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -min(r * A, clamp(r) * A)."""
        return clipped_loss(tokens, self.clip_low, self.clip_high)

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return the loss with the root of the product of the ratios."""

        def loss(token: OracleToken) -> "Tensor":
            ratios = (token.of_rollout(token.log_probs) - token.of_rollout(token.old)).exp()
            ratio = ratios.prod() ** (1 / len(ratios))
            is_low = bool(token.advantage <= 0 and ratio < 1 - self.clip_low)
            is_high = bool(token.advantage > 0 and ratio > 1 + self.clip_high)
            if is_low or is_high:
                return -(1 - self.clip_low if is_low else 1 + self.clip_high) * token.advantage
            return -ratio * token.advantage

        return loss


@dataclass(frozen=True, kw_only=True)
class CispoObjective(ClippedPart, kind="cispo"):
    """The policy gradient with the clipped ratio as a factor, without its gradient (arXiv:2506.13585)."""

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -clamp(r) * A * log_probs."""
        ratio = tokens.ratio
        clamped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        tokens.record_mean("clipped", (ratio != clamped).double())
        return -clamped.detach() * tokens.advantages * tokens.log_probs

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return the loss with the factor as a number."""

        def loss(token: OracleToken) -> "Tensor":
            ratio = exp(float(token.log_probs[token.position]) - float(token.old[token.position]))
            factor = min(max(ratio, 1 - self.clip_low), 1 + self.clip_high)
            return -factor * token.advantage * token.log_probs[token.position]

        return loss
