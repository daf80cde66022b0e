"""LongRoPE (arXiv:2402.13753): a divisor of the frequency of each pair, and another divisor in long sequences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.field import at_least
from moefold.config.groups.rope_scaling import ContextScaling, RopeFormula, unscaled_frequencies
from moefold.config.small_sizes import SmallSizes
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LongRope(ContextScaling):
    """Divide each frequency by its own factor; sequences beyond the original context have other factors."""

    hf_type: ClassVar[str] = "longrope"
    short_factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one for each pair of rotated dims, where train.seq_len is at most original_seq_len.
    Commands that only use a model compare the longest sequence instead."""
    long_factors: tuple[float, ...] = ()
    """Divisors of the frequencies where train.seq_len is above original_seq_len."""
    short_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys together with short_factors; 0: sqrt(1 + ln(factor) /
    ln(original_seq_len))."""
    long_mscale: Annotated[float, at_least(0, "0: not given")] = 0.0
    """Factor on the rotated parts of queries and keys together with long_factors; see short_mscale."""

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
        """Return the divided frequencies; see base class."""
        import torch

        factors = self.long_factors if self.is_long(seq_len) else self.short_factors
        return unscaled_frequencies(theta, rotary_dim) / torch.tensor(factors, dtype=torch.float64)

    def rotated_factor(self, seq_len: int) -> float:
        """Return the given factor, or the factor of sec. 3.3."""
        mscale = self.long_mscale if self.is_long(seq_len) else self.short_mscale
        return mscale or math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq_len))

    def shrink(self, to: SmallSizes) -> Self:
        """Return the part with fewer factors, and an original context that selects the same of both lists."""
        long_context = min(self.original_seq_len, to.seq_len - 1)
        return replace(
            self,
            short_factors=_spread(self.short_factors, to.rotary_dim // 2),
            long_factors=_spread(self.long_factors, to.rotary_dim // 2),
            original_seq_len=long_context if self.is_long(to.large_seq_len) else to.seq_len,
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
    """Return `count` of the values at even distances; none if there are no values."""
    return tuple(values[i * len(values) // count] for i in range(count)) if values else ()
