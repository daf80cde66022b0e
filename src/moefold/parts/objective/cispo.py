"""Clipped importance weights (CISPO, arXiv:2506.13585)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from moefold.config.groups.policy import ClippedPart, OracleToken, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Cispo(ClippedPart):
    """The policy gradient with the clipped ratio as a factor, without its gradient."""

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
