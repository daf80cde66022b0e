"""Objectives of reinforcement learning: the loss of a sampled token from its advantage and log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Sampled tokens of a micro-batch, [B, S/cp] each; tokens with `is_trained` False may have any value."""

    log_probs: "Tensor"
    """Of the policy that is trained, with gradient."""
    log_ratio: "Tensor | None"
    """`log_probs` less the log-probabilities of the policy that sampled; 0 for tokens that are not sampled. None: the
    batch has none."""
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

    law: "Tensor"
    """Log-probabilities of the policy for the tokens of its row, [S]."""
    old: "Tensor"
    """The same of the policy that sampled."""
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
    """Whether it compares with the policy that sampled, so that it may train on rollouts of older weights."""
    reads_rollouts: ClassVar[bool] = False
    """Whether it reads which tokens form a rollout."""
    mean_metrics: ClassVar[tuple[str, ...]] = ("clipped",)
    """Metrics that it records, as means over trained tokens."""

    def log_ratio(self, tokens: PolicyTokens) -> "Tensor | None":
        """Return the logarithm of the ratio that counts, [B, S/cp]; its maximum is the metric `ratio_max`."""
        return tokens.log_ratio

    def token_loss(self, tokens: PolicyTokens) -> "Tensor":
        """Return the loss of each token, [B, S/cp]; `tokens.log_ratio` is `log_ratio`."""
        raise NotImplementedError

    def formula(self) -> Callable[[OracleToken], "Tensor"] | None:
        """Return the loss of one token, 0-dim; None: it has no formula."""
        return None


def clipped_loss(tokens: PolicyTokens, low: float, high: float) -> "Tensor":
    """Return -min(r * A, clamp(r, 1 - low, 1 + high) * A), and record the share of tokens that are clipped."""
    ratio = tokens.ratio
    gain = ratio * tokens.advantages
    clamped_gain = ratio.clamp(1 - low, 1 + high) * tokens.advantages
    tokens.record_mean("clipped", (clamped_gain < gain).double())
    return -gain.minimum(clamped_gain)
