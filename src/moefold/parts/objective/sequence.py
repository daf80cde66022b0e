"""Clipped ratios of whole rollouts (GSPO, arXiv:2507.18071)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.policy import ClippedPart, OracleToken, PolicyTokens, clipped_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutClip(ClippedPart):
    """Clip the geometric mean of the ratios of a rollout; each token has its own advantage and weight."""

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
