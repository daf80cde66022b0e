"""Policy gradient: REINFORCE."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.policy import ObjectivePart, OracleToken, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ObjectivePart):
    """Minus the advantage times the log-probability, for one update on a batch, where the ratio is 1."""

    reads_sampler: ClassVar[bool] = False
    mean_metrics: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -A * log_probs."""
        return -tokens.advantages * tokens.log_probs

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return -A * log_probs."""
        return lambda token: -token.advantage * token.log_probs[token.position]
