"""YaRN (arXiv:2309.00071): divide low frequencies, keep high ones, blend between; scores have a temperature."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import POSITIVE, at_least
from moefold.config.groups.rope_scaling import ContextScaling, RopeFormula, unscaled_frequencies
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Yarn(ContextScaling):
    """Blend by the index of the pair between two numbers of rotations in the original context."""

    hf_type: ClassVar[str] = "yarn"
    hf_optional: ClassVar[frozenset[str]] = frozenset(
        {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
    )
    beta_fast: Annotated[float, POSITIVE] = 32.0
    """Pairs that rotate more often than this in the original context are not scaled."""
    beta_slow: Annotated[float, POSITIVE] = 1.0
    """Pairs that rotate less often than this in the original context are scaled in full."""
    truncate: bool = True
    """Round the bounds of the blended range outwards to whole pairs (gpt-oss does not)."""
    attention_factor: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys; 0: m(mscale) / m(mscale_all_dim) if both are given, otherwise
    m(1), with m(x) = 0.1 * x * ln(factor) + 1."""
    mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See attention_factor; 0: not given."""
    mscale_all_dim: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See attention_factor; 0: not given. With mla, m(mscale_all_dim) squared scales the scores."""

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for a factor of 1, a blend outside of the head, and factors that contradict each other."""
        yield from super().check()
        if self.beta_slow > self.beta_fast:
            rule = f"must be at most model.rope.scaling.beta_fast={self.beta_fast}"
            yield Problem("model.rope.scaling.beta_slow", self.beta_slow, rule, "the published pair is 1.0 and 32.0")
            return
        minimum = math.floor(2 * math.pi * self.beta_slow) + 1
        maximum = math.ceil(2 * math.pi * self.beta_fast * model.rope.theta) - 1
        if not minimum <= self.original_seq_len <= maximum:
            rule = (
                "must be above 2*pi*beta_slow and below 2*pi*beta_fast*theta, so that some frequencies "
                "are scaled and some are not"
            )
            yield Problem(
                "model.rope.scaling.original_seq_len", self.original_seq_len, rule, f"choose {minimum} to {maximum}"
            )
        if self.attention_factor and self.mscale:
            factor = f"{self.key}.attention_factor={self.attention_factor}"
            rule = f"has no effect with {factor}, which it would only derive"
            yield Problem("model.rope.scaling.mscale", self.mscale, rule, "leave one of them out")
        if self.mscale and not self.mscale_all_dim:
            rule = "is divided by the factor of model.rope.scaling.mscale_all_dim, not given"
            yield Problem("model.rope.scaling.mscale", self.mscale, rule, "give both or neither")
        scales_scores = any(layer.attention.has_score_factor for layer in model.decoder_layers)
        if self.mscale_all_dim and not self.mscale and not scales_scores:
            rule = "divides the factor of model.rope.scaling.mscale, which is not given"
            yield Problem("model.rope.scaling.mscale_all_dim", self.mscale_all_dim, rule, "give both or neither")

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the blended frequencies of sec. 3.2; see base class."""
        import torch

        plain = unscaled_frequencies(theta, rotary_dim)
        pairs = len(plain)

        def pair_with_rotations(times: float) -> float:
            """Return the (fractional) index of the pair that rotates `times` times in the original context."""
            return pairs * math.log(self.original_seq_len / (2 * math.pi * times)) / math.log(theta)

        first = pair_with_rotations(self.beta_fast)
        last = pair_with_rotations(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, 2 * pairs - 1)
        # 0.001 as in transformers: the blend falls within one pair.
        interpolation = ((torch.arange(pairs, dtype=torch.float64) - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
        return plain * (1 - interpolation + interpolation / self.factor)

    def rotated_factor(self, seq_len: int) -> float:
        """Return the temperature of sec. 3.4, or the quotient of two (DeepSeek-V2)."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_factor(self) -> float:
        """The squared temperature, if a temperature is given for all dims (DeepSeek-V2)."""
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair by its interpolation ramp, and the factors."""

        def frequency(pair: int, theta: float, rotary_dim: int, seq_len: int) -> float:
            def dim_of(rotations: float) -> float:
                # original_seq_len * theta**(-2d/rotary_dim) / (2 pi) = rotations, solved for d.
                return rotary_dim / 2 * math.log(self.original_seq_len / (rotations * 2 * math.pi), theta)

            low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
            if self.truncate:
                low, high = float(math.floor(low)), float(math.ceil(high))
            low, high = max(0.0, low), min(high, rotary_dim - 1.0)
            if low == high:
                high = low + 0.001
            ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
            plain = 1 / theta ** (2 * pair / rotary_dim)
            return plain / self.factor * ramp + plain * (1 - ramp)

        def mscale(weight: float) -> float:
            return 1 + weight * math.log(self.factor) / 10

        derived = mscale(self.mscale or 1.0) / mscale(self.mscale_all_dim if self.mscale else 0.0)
        rotated_factor = self.attention_factor if self.attention_factor > 0 else derived
        return RopeFormula(frequency, lambda seq_len: rotated_factor, mscale(self.mscale_all_dim) ** 2)
