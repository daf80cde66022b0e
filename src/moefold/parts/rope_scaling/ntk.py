"""NTK-aware scaling with a fixed factor (Hunyuan's `alpha`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.rope_scaling import FactorScaling, RopeFormula, unscaled_frequencies
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class NtkScaling(FactorScaling):
    """Multiply theta by a power of the factor, so that the lowest frequency is divided by the factor."""

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
        """Return powers of the multiplied theta; see base class."""
        return unscaled_frequencies(theta * self.factor ** (rotary_dim / (rotary_dim - 2)), rotary_dim)

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair, with the power of the factor by itself."""

        def frequency(pair: int, theta: float, rotary_dim: int, seq_len: int) -> float:
            slower: float = self.factor ** (-2 * pair / (rotary_dim - 2))
            return slower / theta ** (2 * pair / rotary_dim)

        return RopeFormula(frequency)
