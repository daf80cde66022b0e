"""Linear attention with heads: the common sizes and parameters of its kinds."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import MaxMagnitude, VerifyAs, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.groups.attention import AttentionCore, AttentionPart
from moefold.message_text import Problem, nearest_multiples

if TYPE_CHECKING:
    from moefold.config.base.small_sizes import SmallSizes
    from moefold.config.groups.layer_sizes import LayerSizes


LINEAR_CHUNK_SIZE = 64
"""Tokens of a chunk of linear attention: products within chunks grow with it, the number of steps falls with it."""
Factors = tuple[tuple[float, float, float, float, float], tuple[float, float, float, float, float]]
"""Factors of the memory of the recomputed recurrence, in float32 numbers for each token: for float32 and for bfloat16.
Each factor multiplies one size: the products within a chunk, the keys of the key heads, the keys of the value heads,
the values, and the states between chunks. They fit measurements of ten shapes
(docs/log.md#2026-11-26-linear-attention-in-c). C uses the first, the last, and 3 for keys (2 without delta rule)."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionPart(AttentionPart):
    """Recurrence over a state [D, Dv] of each value head. Each key head serves the same number of value heads."""

    is_recurrent: ClassVar[bool] = True
    torch_recurrence: ClassVar[Factors]
    """Memory of the recurrence in torch."""
    c_recurrence: ClassVar[Factors]
    """Memory of the recurrence in C."""
    num_key_heads: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 4
    """Query and key heads. Each serves the same number of value heads."""
    num_value_heads: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 4
    """Value heads, each with its own state, a multiple of num_key_heads."""
    key_head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 32
    """Width of a query and key head."""
    value_head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH), VerifyAs.SIZE] = 32
    """Width of a value head."""

    def shrink(self, small: "SmallSizes") -> Self:
        """Return the part with one narrow key head for each rank."""
        return replace(
            self,
            num_key_heads=small.tp,
            num_value_heads=small.tp * min(2, self.num_value_heads // self.num_key_heads),
            key_head_dim=small.head_dim,
            value_head_dim=small.head_dim + 2,
        )

    def check(self) -> Iterator[Problem]:
        """Yield a number of value heads that is not a multiple of the key heads."""
        if self.num_value_heads % self.num_key_heads:
            yield Problem(
                "model.linear_attention.num_value_heads",
                self.num_value_heads,
                f"must be a multiple of model.linear_attention.num_key_heads={self.num_key_heads}, each of which "
                "serves as many",
                f"choose {nearest_multiples(self.num_value_heads, self.num_key_heads)}",
            )

    @property
    def key_width(self) -> int:
        """Width of the queries, and of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of the values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Key channels of all value heads."""
        return self.num_value_heads * self.key_head_dim

    @property
    def state_size(self) -> int:
        """Numbers of the states of all heads of one sample."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def transition_size(self) -> int:
        """Numbers of the matrices [D, D] of all heads that a segment of tokens multiplies the states by."""
        return self.num_value_heads * self.key_head_dim**2

    def widths(self, tp: int) -> tuple[int, int, int]:
        """Return the widths of a rank's keys and values, and its value heads."""
        heads = self.num_value_heads // tp
        return self.num_key_heads // tp * self.key_head_dim, heads * self.value_head_dim, heads

    def projected_width(self, tp: int) -> int:
        """Return the projected numbers of a token for the recurrence on a rank, including its output gate."""
        raise NotImplementedError

    def tp_unit(self, hidden: int) -> tuple[str, int]:
        """Return the key and number of the key heads, which tp must divide."""
        return "model.linear_attention.num_key_heads", self.num_key_heads

    @property
    def low_ranks(self) -> int:
        """Sum of the low-rank widths of decays and gate. 0: they are projected directly."""
        return 0

    def saved(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes of the projections, which are saved to recompute the recurrence, and of its output."""
        tp = sizes.parallel.tp
        saved = sizes.norm_with_output(saves_output=tp == 1, part="attention")
        saved["attention"] += sizes.gathered_bytes(self.projected_width(tp) + self.low_ranks)
        if self.low_ranks and tp > 1:
            # The norm's output, for the projections of this rank's own tokens.
            saved["attention"] += sizes.hidden_bytes
        saved["core attention"] += sizes.gathered_bytes(self.widths(tp)[1])
        return saved

    def delayed_wgrad(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes of the projections, and of the inputs of the low ranks."""
        tp = sizes.parallel.tp
        inputs = 3 if self.low_ranks else 2
        width = inputs * sizes.hidden_size + self.projected_width(tp) + self.widths(tp)[1]
        return Counter(attention=sizes.gathered_bytes(width + 2 * self.low_ranks))

    def transient(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the temporary bytes of the recurrence, which is recomputed in the backward pass, exact to 10 %."""
        tp = sizes.parallel.tp
        key, value, heads = self.widths(tp)
        factors = self.c_recurrence if sizes.has_c_recurrence else self.torch_recurrence
        is_low_precision = sizes.item_bytes < sizes.high_precision_bytes
        parts = (
            heads * LINEAR_CHUNK_SIZE,
            key,
            heads * self.key_head_dim,
            value,
            value * self.key_head_dim / LINEAR_CHUNK_SIZE,
        )
        numbers = sum(factor * width for factor, width in zip(factors[is_low_precision], parts, strict=True))
        transient = Counter({"core attention": round(sizes.gathered_tokens * numbers * sizes.high_precision_bytes)})
        if "layer" in sizes.recompute:
            # The recomputed layer holds the projections three times. Its saved tensors already count one.
            transient["attention"] += 2 * sizes.gathered_bytes(self.projected_width(tp))
        return transient


@dataclass(frozen=True, kw_only=True)
class DeltaRulePart(LinearAttentionPart):
    """Delta rule with decays, after convolutions over queries, keys and values."""

    conv_kernel: Annotated[int, at_least(2), MaxMagnitude(MAX_WIDTH), VerifyAs.SIZE] = 4
    """Tokens that the causal convolution of each channel combines, itself included."""

    def shrink(self, small: "SmallSizes") -> Self:
        """Return the part with short convolutions."""
        return replace(super().shrink(small), conv_kernel=min(self.conv_kernel, small.conv_kernel))

    def core(self, hidden: int) -> AttentionCore:
        """Return the sizes of the states. Each state is read twice, written once, and decays."""
        return AttentionCore(
            state_size=self.state_size,
            transition_size=self.transition_size,
            state_flops=8 * self.state_size,
            conv_width=2 * self.key_width + self.value_width,
            conv_kernel=self.conv_kernel,
        )

    def delta_params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `DeltaAttention`, without the norm."""
        heads = self.num_value_heads
        widths = {"q": self.key_width, "k": self.key_width, "v": self.value_width}
        for name, width in widths.items():
            yield ParamSpec(f"w{name}", (width, hidden), "attention", tp_dim=0)
        yield ParamSpec("wb", (heads, hidden), "attention", tp_dim=0, never_as_matrix=True)
        yield ParamSpec("wo", (hidden, self.value_width), "attention", tp_dim=1, drawn="output")
        for name, width in widths.items():
            shape = width, self.conv_kernel
            yield ParamSpec(f"conv_{name}", shape, "attention", tp_dim=0, never_as_matrix=True, drawn="convolution")
        yield ParamSpec("a_log", (heads,), "attention", tp_dim=0, in_exponent=True, drawn="decay_rate")
