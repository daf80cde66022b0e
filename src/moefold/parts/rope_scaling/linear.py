"""Position interpolation (arXiv:2306.15595)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.rope_scaling import FactorScaling, RopeFormula, unscaled_frequencies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LinearScaling(FactorScaling):
    """Divide all frequencies by the factor."""

    hf_type: ClassVar[str] = "linear"

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return the divided frequencies; see base class."""
        return unscaled_frequencies(theta, rotary_dim) / self.factor

    def formula(self) -> RopeFormula:
        """Return the frequency of a pair at positions that are divided by the factor."""
        return RopeFormula(lambda pair, theta, rotary_dim, seq_len: 1 / theta ** (2 * pair / rotary_dim) / self.factor)
