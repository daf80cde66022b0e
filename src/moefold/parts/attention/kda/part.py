"""Kimi Delta Attention (KDA, arXiv:2510.26692): delta rule with a decay for each key channel."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.base.field import Bound
from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.attention import AttentionFrame, LinearFormula, norm_param
from moefold.config.groups.linear_attention import DeltaRulePart, Factors

if TYPE_CHECKING:
    from moefold.parts.attention.kda.module import KimiDeltaAttention


@dataclass(frozen=True, kw_only=True)
class KdaPart(DeltaRulePart):
    """Apply the delta rule, with a decay for each key channel (Kimi Delta Attention, arXiv:2510.26692).

    Decays and gate are projected through low ranks or directly.
    """

    torch_recurrence: ClassVar[Factors] = ((1.7, 3.2, 34.4, 2.5, 0.0), (1.7, 0.1, 34.5, 2.5, 0.0))
    c_recurrence: ClassVar[Factors] = ((2.0, 10.7, 3.5, 4.3, 1.0), (2.0, 7.6, 3.5, 3.3, 1.0))
    full_rank_gates: bool = False
    """Project the hidden state to decays and output gate directly (Ling 3), not through value_head_dim dimensions."""
    decay_bound: Annotated[float, Bound("must be at most 0 (0: none)", lambda bound: bound <= 0)] = 0.0
    """Lower bound of the logarithm of a decay (Ling 3: -5), bound * sigmoid(exp(a_log) * (a + dt_bias)). 0: none, and
    the logarithm is -exp(a_log) * softplus(a + dt_bias)."""

    @property
    def low_ranks(self) -> int:
        """Widths of the low ranks of decays and gate together. 0: they are projected directly."""
        return 0 if self.full_rank_gates else 2 * self.value_head_dim

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `KimiDeltaAttention`. See base class."""
        rank = self.value_head_dim
        yield from self.delta_params(hidden)
        if self.full_rank_gates:
            yield ParamSpec("wa", (self.channels, hidden), "attention", tp_dim=0)
            yield ParamSpec("wg", (self.value_width, hidden), "attention", tp_dim=0)
        else:
            yield ParamSpec("wa_down", (rank, hidden), "attention")
            yield ParamSpec("wa_up", (self.channels, rank), "attention", tp_dim=0)
            yield ParamSpec("wg_down", (rank, hidden), "attention")
            yield ParamSpec("wg_up", (self.value_width, rank), "attention", tp_dim=0)
        yield ParamSpec("dt_bias", (self.channels,), "attention", tp_dim=0, in_exponent=True, drawn="time_step")
        yield norm_param("norm", rank, drawn="ones")

    def projected_width(self, tp: int) -> int:
        """Return the width of queries, keys, values, gate, decays and write strengths. See base class."""
        key, value, heads = self.widths(tp)
        return 2 * key + 2 * value + heads * (self.key_head_dim + 1)

    def build(self, frame: AttentionFrame) -> "KimiDeltaAttention":
        """Return the module. See base class."""
        from moefold.parts.attention.kda.module import KimiDeltaAttention

        return KimiDeltaAttention(self, frame)

    def formula(self) -> LinearFormula:
        """Return the output for the tokens of one document. See base class."""
        from moefold.parts.attention.kda.oracle import output

        return partial(output, self)
