"""Gated linear attention (GLA, arXiv:2312.06635): a decay for each key channel, without delta rule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import MaxMagnitude, VerifyAs, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import AttentionCore, AttentionFrame, LinearFormula, norm_param
from moefold.config.groups.linear_attention import Factors, LinearAttentionPart

if TYPE_CHECKING:
    from moefold.parts.attention.gla.module import GatedLinearAttention


@dataclass(frozen=True, kw_only=True)
class GlaPart(LinearAttentionPart):
    """Decay each key channel by a projection through a low rank, without delta rule (arXiv:2312.06635)."""

    torch_recurrence: ClassVar[Factors] = ((0.75, 0.0, 29.6, 0.0, 0.0), (0.9, 0.0, 31.4, 0.5, 0.0))
    c_recurrence: ClassVar[Factors] = ((1.0, 2.2, 2.8, 2.4, 1.0), (1.0, 1.7, 2.8, 2.9, 1.0))
    gate_rank: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH), VerifyAs.SIZE] = 16
    """Width between the two projections of the decays."""

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with a low rank of decays. See base class."""
        return replace(super().shrink(small), gate_rank=min(self.gate_rank, small.head_dim))

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `GatedLinearAttention`. See base class."""
        key, value = self.key_width, self.value_width
        for name, width in (("wq", key), ("wk", key), ("wv", value), ("wg", value)):
            yield ParamSpec(name, (width, hidden), "attention", tp_dim=0)
        yield ParamSpec("wa_down", (self.gate_rank, hidden), "attention")
        yield ParamSpec("wa_up", (self.channels, self.gate_rank), "attention", tp_dim=0)
        yield ParamSpec("ba", (self.channels,), "attention", tp_dim=0)
        yield ParamSpec("wo", (hidden, value), "attention", tp_dim=1, drawn="output")
        yield norm_param("norm", self.value_head_dim, drawn="ones")

    def core(self, hidden: int) -> AttentionCore:
        """Return the states. Each is read and written once, and decays."""
        return AttentionCore(
            state_size=self.state_size, transition_size=self.transition_size, state_flops=6 * self.state_size
        )

    def projected_width(self, tp: int) -> int:
        """Return the width of queries, keys, values, gate, and decays. See base class."""
        key, value, heads = self.widths(tp)
        return 2 * key + 2 * value + heads * self.key_head_dim

    @property
    def low_ranks(self) -> int:
        """Width of the low rank of the decays."""
        return self.gate_rank

    def build(self, frame: AttentionFrame) -> "GatedLinearAttention":
        """Return the module. See base class."""
        from moefold.parts.attention.gla.module import GatedLinearAttention

        return GatedLinearAttention(self, frame)

    def formula(self) -> LinearFormula:
        """Return the output for the tokens of one document. See base class."""
        from moefold.parts.attention.gla.oracle import output

        return partial(output, self)
