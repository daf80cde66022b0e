"""RoPE without scaling (arXiv:2104.09864)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.rope_scaling import RopeFormula, RopeScalingPart, unscaled_frequencies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Unscaled(RopeScalingPart):
    """Leave the frequencies unchanged."""

    hf_type: ClassVar[str] = "default"

    def frequencies(self, theta: float, rotary_dim: int, seq_len: int) -> "Tensor":
        """Return powers of theta; see base class."""
        return unscaled_frequencies(theta, rotary_dim)

    def formula(self) -> RopeFormula:
        """Return a power of theta for each pair."""
        return RopeFormula(lambda pair, theta, rotary_dim, seq_len: 1 / theta ** (2 * pair / rotary_dim))
