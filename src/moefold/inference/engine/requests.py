"""Requests and completions of the generation engine, and its settings."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.config.sections.rl import RolloutConfig
from moefold.cost.kv_cache import CacheKind
from moefold.errors import ConfigError
from moefold.inference.sampling import SamplingParams
from moefold.message_text import Problem, Setting

FinishReason = Literal["eos", "length", "stop"]


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """Changes of the logits for the draws of a sample's tokens, before the temperature.

    Log-probabilities are computed from the unchanged logits, like without top-k and top-p filtering.
    """

    bias: tuple[tuple[int, float], ...] = ()
    """Numbers that are added to the logits of tokens: (id, bias)."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative logits, of tokens in prompt and sample."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it was drawn in the sample."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token of the sample."""
    min_tokens: int = 0
    """Minimum new tokens before an end-of-text token."""
    grammar: str = ""
    """Grammar of the sample's text, for `GenerationEngine.open`. Empty means any text."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate: the continuation of a prompt.

    The tokens are a pure function of the weights, the prompt, the sampling parameters, `prompt_number` and
    `sample_number`. The other requests, their order and the engine's settings have no effect on them.
    """

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    prompt_number: int = 0
    """Key of the random numbers, at least 0."""
    sample_number: int = 0
    """Key of the random numbers, at least 0. The samples of one prompt have different keys."""
    max_tokens: int
    """Maximum number of new tokens, at least 1."""
    eos_ids: frozenset[int] = frozenset()
    """End-of-text tokens."""
    sampling: SamplingParams | None = None
    """Sampling parameters of this sample. None means the engine's."""
    num_alternatives: int = 0
    """Number of most likely tokens at each position whose log-probabilities `NewToken` reports."""
    rules: LogitRules | None = None
    """Changes of the logits."""
    prompt_alternatives: int | None = None
    """Number of most likely tokens reported with the log-probability of each token of the prompt."""

    @property
    def max_positions(self) -> int:
        """Maximum positions with cached keys and values: the last new token is never an input of the model."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Generated continuation of one prompt."""

    tokens: tuple[int, ...]
    """New tokens, including the end-of-text token that ended the sample, if any."""
    log_probs: tuple[float, ...]
    """Log-probability of each token under softmax(logits / temperature), float32, before top-k and top-p filtering.

    With temperature 0: under softmax(logits).
    """
    finish_reason: FinishReason
    """Reason for the end: an end-of-text token, `Request.max_tokens`, or the caller's stop condition."""
    expert_ids: NDArray[np.integer] | None = field(default=None, compare=False)
    """Experts of each token of prompt and completion in each MoE layer of this rank, [MoE layers of this rank, prompt +
    new tokens - 1, K], or None if not recorded. The last token is never an input of the model."""


class PromptScore(NamedTuple):
    """Log-probability of a token of a prompt after the tokens before it, under softmax(logits)."""

    log_prob: float
    alternatives: tuple[tuple[int, float], ...]
    """The `Request.prompt_alternatives` most likely tokens at the position, in descending order."""


class NewToken(NamedTuple):
    """A token that a pass added to a sample."""

    request_id: int
    """Id of the request, see `GenerationSession.add`."""
    token: int
    log_prob: float
    finish_reason: FinishReason | None
    """None if the sample continues."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The `Request.num_alternatives` most likely tokens with their log-probabilities, in descending order."""
    prompt_scores: tuple[PromptScore, ...] = ()
    """Scores of the prompt's tokens except the first, with a sample's first token and if requested."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Limits of the generation engine on one rank. They change speed and memory, not completions."""

    slots: int = 256
    """Maximum samples that are decoded at a time."""
    pass_tokens: int = 2048
    """Maximum tokens of a forward pass, of prompts and of samples together, at least `slots`."""
    cache_gib: float = 1.0
    """GiB for the cached keys and values (or latents) of this rank's layers. 0: as much as the requests need."""
    cache: CacheKind = "latents"
    """Contents of the cache of latent attention: latents, or heads, which are larger and computed as in training."""
    share_prompts: bool = True
    """True if samples of equal prompts share the cache of the prompt, which is then computed once."""

    @classmethod
    def of_recipe(cls, rollout: RolloutConfig) -> "EngineSettings":
        """Return the sampling settings of reinforcement learning, from [rollout]."""
        return cls(
            slots=rollout.slots, pass_tokens=rollout.pass_tokens, cache_gib=rollout.cache_gib, cache=rollout.cache
        )

    def check(self) -> None:
        """Check the ranges of the settings. Raise ConfigError if a setting is out of its range."""
        if self.slots < 1:
            raise ConfigError(Problem("rollout.slots", self.slots, "must be at least 1"))
        if self.pass_tokens < self.slots:
            raise ConfigError(
                f"{Setting('rollout.pass_tokens', self.pass_tokens)} must be at least "
                f"{Setting('rollout.slots', self.slots)}: each sample that is decoded adds one token to a pass; choose "
                "fewer slots or more tokens"
            )
        if not 0 <= self.cache_gib < float("inf"):
            raise ConfigError(
                f"{Setting('rollout.cache_gib', self.cache_gib):g} must be at least 0 (0: what the requests need)"
            )
