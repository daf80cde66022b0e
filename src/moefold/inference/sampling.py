"""How the next token is chosen, and what of it makes sense. Torch-free."""

from dataclasses import dataclass

from moefold.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token, the lowest id of equal ones."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this (arXiv:1904.09751)."""
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            ConfigError: one is out of its range, or has no effect.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature {self.temperature:g} must be at least 0 (0: the likeliest token)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p:g} must lie in (0, 1]: above 0 and at most 1 (1: all tokens)")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} must be at least 0 (0: all tokens)")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed} must be at least 0 and below 2**63")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ConfigError("--temperature 0 takes the likeliest token, so --top-p and --top-k have no effect")
