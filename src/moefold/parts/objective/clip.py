"""Clipped ratios (PPO, arXiv:1707.06347; GRPO, arXiv:2402.03300), with two bounds as DAPO (arXiv:2503.14476)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from moefold.config.groups.policy import ClippedPart, OracleToken, PolicyTokens, clipped_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Clip(ClippedPart):
    """The lower of the gain and the gain with the ratio clipped, as a loss."""

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
