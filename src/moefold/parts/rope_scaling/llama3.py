"""RoPE scaling of Llama 3.1 (arXiv:2407.21783): divide low frequencies, keep high ones, blend between."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import POSITIVE
from moefold.config.groups.rope_scaling import ContextScaling, RopeFormula, unscaled_frequencies
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(ContextScaling):
    """Blend by the number of rotations in the original context."""

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
        """Return the blended frequencies; see base class."""
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
