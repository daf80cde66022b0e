"""Sampling parameters of generation and their validation."""

from dataclasses import dataclass

from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

MIN_TEMPERATURE = 1e-3


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of the next token."""

    temperature: float = 1.0
    """Divisor of the logits. 0: greedy, with the lowest id among equal logits."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0: all."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of likeliest tokens whose probabilities sum to this
    (arXiv:1904.09751)."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the likeliest one, before top_k and top_p (arXiv:2407.01082)."""
    seed: int = 0

    @property
    def takes_all_tokens(self) -> bool:
        """Return whether the distribution contains all tokens."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    def check(self) -> None:
        """Raise ConfigError if a parameter is out of its range, or has no effect."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"{Setting('--temperature', self.temperature):g} must be at least 0 (0: the likeliest token)"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"{Setting('--temperature', self.temperature):g} must be at least {MIN_TEMPERATURE:g}, where logits "
                "divided by it do not overflow, or 0 for the likeliest token"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"{Setting('--top-p', self.top_p):g} must lie in (0, 1]: above 0 and at most 1 (1: all tokens)"
            )
        if not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"{Setting('--min-p', self.min_p):g} must lie between 0 (all tokens) and 1 (only the likeliest)"
            )
        if self.top_k < 0:
            raise ConfigError(Problem("--top-k", self.top_k, "must be at least 0 (0: all tokens)"))
        if not 0 <= self.seed < 2**63:
            raise ConfigError(Problem("--seed", self.seed, "must be at least 0 and below 2**63"))
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0):
            raise ConfigError(
                f"{Setting('--temperature', 0)} takes the likeliest token, so {Setting('--top-p')}, "
                f"{Setting('--top-k')} and {Setting('--min-p')} have no effect"
            )
