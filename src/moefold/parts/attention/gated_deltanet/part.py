"""Gated DeltaNet (arXiv:2412.06464): delta rule with a decay for each head."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.attention import AttentionFrame, LinearFormula, norm_param
from moefold.config.groups.linear_attention import DeltaRulePart, Factors

if TYPE_CHECKING:
    from moefold.parts.attention.gated_deltanet.module import GatedDeltaNet


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetPart(DeltaRulePart):
    """Apply the delta rule, with a decay for each head (arXiv:2412.06464) and a gate SiLU(wg x)."""

    torch_recurrence: ClassVar[Factors] = ((3.15, 6.4, 5.0, 4.8, 2.15), (3.2, 3.4, 4.9, 3.8, 2.3))
    c_recurrence: ClassVar[Factors] = ((1.0, 10.2, 3.0, 5.4, 1.0), (1.0, 7.2, 3.0, 4.4, 1.0))

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `GatedDeltaNet`. See base class."""
        heads = self.num_value_heads
        yield from self.delta_params(hidden)
        yield ParamSpec("wg", (self.value_width, hidden), "attention", tp_dim=0)
        yield ParamSpec("wa", (heads, hidden), "attention", tp_dim=0, never_as_matrix=True)
        yield ParamSpec("dt_bias", (heads,), "attention", tp_dim=0, in_exponent=True, drawn="time_step")
        yield norm_param("norm", self.value_head_dim, drawn="ones")

    def projected_width(self, tp: int) -> int:
        """Return the width of queries, keys, values, gate, decays and write strengths. See base class."""
        key, value, heads = self.widths(tp)
        return 2 * key + 2 * value + 2 * heads

    def build(self, frame: AttentionFrame) -> "GatedDeltaNet":
        """Return the module. See base class."""
        from moefold.parts.attention.gated_deltanet.module import GatedDeltaNet

        return GatedDeltaNet(self, frame)

    def formula(self) -> LinearFormula:
        """Return the output for the tokens of one document. See base class."""
        from moefold.parts.attention.gated_deltanet.oracle import output

        return partial(output, self)
