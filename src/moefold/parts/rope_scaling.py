"""Scalings of RoPE."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import POSITIVE, at_least
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.rope_scaling import (
    ContextScaling,
    FactorScaling,
    RopeFormula,
    RopeScalingPart,
    unscaled_frequencies,
)
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class UnscaledRope(RopeScalingPart, kind="none"):
    """Leave the frequencies unchanged (arXiv:2104.09864)."""

    hf_type: ClassVar[str] = "default"

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return powers of theta. See base class."""
        return unscaled_frequencies(theta, rotary_dim)

    def formula(self) -> RopeFormula:
        """Return a power of theta for each pair."""
        return RopeFormula(lambda pair, theta, rotary_dim, seq_len: 1 / theta ** (2 * pair / rotary_dim))


@dataclass(frozen=True, kw_only=True)
class LinearScaling(FactorScaling, kind="linear"):
    """Divide all frequencies by the factor: position interpolation (arXiv:2306.15595)."""

    hf_type: ClassVar[str] = "linear"

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the divided frequencies. See base class."""
        return unscaled_frequencies(theta, rotary_dim) / self.factor

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair at positions that are divided by the factor."""
        return RopeFormula(lambda pair, theta, rotary_dim, seq_len: 1 / theta ** (2 * pair / rotary_dim) / self.factor)


@dataclass(frozen=True, kw_only=True)
class NtkScaling(FactorScaling, kind="ntk"):
    """Multiply theta by a power of the factor, so that the lowest frequency is divided by the factor.

    NTK-aware scaling with a fixed factor, Hunyuan's `alpha`.
    """

    hf_type: ClassVar[str] = "dynamic"
    hf_names: ClassVar[Mapping[str, str]] = {"factor": "alpha"}

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for a factor of 1, and for heads with only one rotated pair of dims."""
        yield from super().check()
        rotary_dim = model.rope_settings.rotary_dim
        if rotary_dim <= 2:
            rule = f"needs more than the {rotary_dim} dimensions that RoPE rotates"
            yield Problem(self.key, self.kind, rule, "choose 'linear', or more dimensions")

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return powers of the multiplied theta. See base class."""
        return unscaled_frequencies(theta * self.factor ** (rotary_dim / (rotary_dim - 2)), rotary_dim)

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair, with the power of the factor by itself."""

        def frequency(pair: int, theta: float, rotary_dim: int, seq_len: int) -> float:
            slower: float = self.factor ** (-2 * pair / (rotary_dim - 2))
            return slower / theta ** (2 * pair / rotary_dim)

        return RopeFormula(frequency)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(ContextScaling, kind="llama3"):
    """Divide low frequencies, keep high ones, and blend between (Llama 3.1, arXiv:2407.21783).

    The number of rotations in the original context decides.
    """

    hf_type: ClassVar[str] = "llama3"
    low_freq_factor: Annotated[float, POSITIVE] = 1.0
    """Wavelengths above original/low are scaled in full."""
    high_freq_factor: Annotated[float, POSITIVE] = 4.0
    """Wavelengths below original/high are not scaled."""

    def check(self) -> Iterator[Problem]:
        """Yield errors for a factor of 1, and for a band with exchanged ends."""
        yield from super().check()
        if self.low_freq_factor > self.high_freq_factor:
            rule = f"must be at most model.rope.scaling.high_freq_factor={self.high_freq_factor}"
            key = "model.rope.scaling.low_freq_factor"
            yield Problem(key, self.low_freq_factor, rule, "the published pair is 1.0 and 4.0")

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the blended frequencies. See base class."""
        plain = unscaled_frequencies(theta, rotary_dim)
        rotations = self.original_seq_len * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        if span:
            extrapolation = ((rotations - self.low_freq_factor) / span).clamp(0.0, 1.0)
        else:
            # Equal factors (Llama 4 Scout): no blend.
            extrapolation = (rotations >= self.low_freq_factor).to(plain)
        return plain * (extrapolation + (1 - extrapolation) / self.factor)

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair by cases of its wavelength."""
        longest = self.original_seq_len / self.low_freq_factor
        shortest = self.original_seq_len / self.high_freq_factor

        def frequency(pair: int, theta: float, rotary_dim: int, seq_len: int) -> float:
            plain = 1 / theta ** (2 * pair / rotary_dim)
            wavelength = 2 * math.pi / plain
            if wavelength < shortest or wavelength == longest == shortest:
                return plain
            if wavelength > longest:
                return plain / self.factor
            smooth = self.original_seq_len / wavelength - self.low_freq_factor
            smooth /= self.high_freq_factor - self.low_freq_factor
            return (1 - smooth) * plain / self.factor + smooth * plain

        return RopeFormula(frequency)


@dataclass(frozen=True, kw_only=True)
class Yarn(ContextScaling, kind="yarn"):
    """Divide low frequencies, keep high ones, and blend between. Scores have a temperature (arXiv:2309.00071).

    The index of the pair decides, between two numbers of rotations in the original context.
    """

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
    """Factor on the rotated parts of queries and keys. 0: m(mscale) / m(mscale_all_dim) if both are given, otherwise
    m(1), with m(x) = 0.1 * x * ln(factor) + 1."""
    mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See attention_factor. 0: not given."""
    mscale_all_dim: Annotated[float, at_least(0, "0: not given")] = 0.0
    """See attention_factor. 0: not given. With mla, m(mscale_all_dim) squared scales the scores."""

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
        """Return the blended frequencies of sec. 3.2. See base class."""
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


@dataclass(frozen=True, kw_only=True)
class LongRope(ContextScaling, kind="longrope"):
    """Divide each frequency by its own factor. Sequences beyond the original context have other factors.

    arXiv:2402.13753.
    """

    hf_type: ClassVar[str] = "longrope"
    short_factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one for each pair of rotated dims, where train.seq_len is at most original_seq_len.
    Commands that only use a model compare the longest sequence instead."""
    long_factors: tuple[float, ...] = ()
    """Divisors of the frequencies where train.seq_len is above original_seq_len."""
    short_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys together with short_factors. 0: sqrt(1 + ln(factor) /
    ln(original_seq_len))."""
    long_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys together with long_factors. See short_mscale."""

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for factors that are not a positive number for each pair, or an undefined attention factor."""
        pairs = model.rope_settings.rotary_dim // 2
        for key, factors in (("short", self.short_factors), ("long", self.long_factors)):
            key = f"{self.key}.{key}_factors"
            if len(factors) != pairs:
                rule = (
                    f"has {len(factors)} numbers, and model.rope.scaling='longrope' needs one for each of the {pairs} "
                    "pairs of dims that RoPE rotates"
                )
                yield Problem(key, None, rule, f"give {pairs}")
            elif invalid := [factor for factor in factors if not 0 < factor < math.inf]:
                rule = f"has the number {invalid[0]}, and divides frequencies"
                yield Problem(key, None, rule, "give finite numbers above 0")
        if self.original_seq_len == 1 and not (self.short_mscale > 0 and self.long_mscale > 0):
            yield Problem(
                "model.rope.scaling.original_seq_len",
                1,
                "has the logarithm 0, by which the attention factor of longrope divides",
                "give the context length of the first training, or short_mscale and long_mscale",
            )

    def is_long(self, seq_len: int) -> bool:
        """Return whether sequences of at most `seq_len` tokens have the long factors."""
        return seq_len > self.original_seq_len

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the divided frequencies. See base class."""
        import torch

        factors = self.long_factors if self.is_long(seq_len) else self.short_factors
        return unscaled_frequencies(theta, rotary_dim) / torch.tensor(factors, dtype=torch.float64)

    def rotated_factor(self, seq_len: int) -> float:
        """Return the given factor, or the factor of sec. 3.3."""
        mscale = self.long_mscale if self.is_long(seq_len) else self.short_mscale
        return mscale or math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq_len))

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with fewer factors, and an original context that selects the same of both lists."""
        long_context = min(self.original_seq_len, small.seq_len - 1)
        return replace(
            self,
            short_factors=_spread(self.short_factors, small.rotary_dim // 2),
            long_factors=_spread(self.long_factors, small.rotary_dim // 2),
            original_seq_len=long_context if self.is_long(small.large_seq_len) else small.seq_len,
        )

    def formula(self) -> RopeFormula:
        """Return frequency and factor, each selected by the length of the sequence."""

        def frequency(pair: int, theta: float, rotary_dim: int, seq_len: int) -> float:
            divisors = (self.short_factors, self.long_factors)[seq_len > self.original_seq_len]
            return 1 / theta ** (2 * pair / rotary_dim) / divisors[pair]

        def rotated_factor(seq_len: int) -> float:
            mscale = (self.short_mscale, self.long_mscale)[seq_len > self.original_seq_len]
            return mscale or math.sqrt(1 + math.log(self.factor, self.original_seq_len))

        return RopeFormula(frequency, rotated_factor)


def _spread(values: tuple[float, ...], count: int) -> tuple[float, ...]:
    """Return `count` of the values at even distances, or none if there are no values."""
    return tuple(values[i * len(values) // count] for i in range(count)) if values else ()
