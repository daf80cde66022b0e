"""Simple policy optimization (SPO, arXiv:2401.16025)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Interval

from moefold.config.groups.policy import ObjectivePart, OracleToken, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SimplePolicy(ObjectivePart):
    """The ratio times the advantage, less a square penalty that keeps the ratio within 1 - epsilon and 1 + epsilon."""

    interface: ClassVar[int] = 1
    mean_metrics: ClassVar[tuple[str, ...]] = ("outside",)

    epsilon: Annotated[float, Interval(gt=0, le=1)] = 0.2
    """Distance of the best ratio from 1."""

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return -(r * A - |A| * (r - 1)^2 / (2 * epsilon))."""
        ratio = tokens.ratio
        tokens.record_mean("outside", ((ratio - 1).abs() > self.epsilon).double())
        return tokens.advantages.abs() * (ratio - 1).square() / (2 * self.epsilon) - ratio * tokens.advantages

    def formula(self) -> Callable[[OracleToken], "Tensor"]:
        """Return the loss with its square completed, around the best ratio."""

        def loss(token: OracleToken) -> "Tensor":
            advantage = float(token.advantage)
            best = 1 + self.epsilon if advantage > 0 else 1 - self.epsilon
            ratio = (token.log_probs[token.position] - token.old[token.position]).exp()
            return abs(advantage) / (2 * self.epsilon) * ((ratio - best) ** 2 - self.epsilon**2) - advantage

        return loss
