"""Grouped-query attention (GQA, arXiv:2305.13245): groups of query heads share keys and values."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import SHARE, MaxMagnitude, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.groups.attention import (
    AttentionCore,
    AttentionFrame,
    QueryKeyNorm,
    SoftmaxAttentionPart,
    SoftmaxFormula,
    Temperature,
    gate_bytes,
    prefixed,
)
from moefold.config.groups.indexer import SELECTION_COPIES
from moefold.cost.saved_tensors import BytesByPart
from moefold.message_text import Problem, join_with_or, nearest_multiples, nearest_numbers
from moefold.topology.layout import divisors

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.config.model import ModelConfig
    from moefold.parts.attention.gqa.module import GroupedQueryAttention


@dataclass(frozen=True, kw_only=True)
class GqaPart(SoftmaxAttentionPart):
    """Attend with heads projected from the layer's input. Groups of query heads share keys and values."""

    has_adapters: ClassVar[bool] = True
    has_temperature: ClassVar[bool] = True
    num_kv_heads: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 4
    """Key/value heads, equal to num_heads for plain multi-head attention."""
    head_dim: Annotated[int, at_least(0, "0: hidden_size/num_heads"), MaxMagnitude(MAX_WIDTH)] = 0
    """Width of one head, D. 0: hidden_size / num_heads."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """Bias on the output projection (gpt-oss)."""
    sinks: bool = False
    """Learned sink logit per head that takes part in the softmax and contributes no value (gpt-oss)."""
    scale: Annotated[float, at_least(0, "0: 1/sqrt(head_dim)")] = 0.0
    """Factor of the attention scores (Granite's attention_multiplier). 0: 1 / sqrt(head_dim)."""
    rope_fraction: Annotated[float, SHARE] = 1.0
    """Fraction of each head's dims to which RoPE is applied, in (0, 1]."""
    qk_norm: QueryKeyNorm | None = None
    """RMSNorm over the queries and over the keys before RoPE (Qwen3)."""
    temperature: Temperature | None = None
    """Temperature of the layers without RoPE. none: 1."""

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        """See base class."""
        return round(self.head_dim * self.rope_fraction)

    @property
    def has_sinks(self) -> bool:
        """See base class."""
        return self.sinks

    def with_heads(self, hidden: int) -> Self:
        """See base class."""
        return replace(self, head_dim=self.head_dim or hidden // self.num_heads)

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with few narrow heads, grouped as before."""
        return replace(
            self,
            num_heads=small.query_heads(self.num_heads, self.num_kv_heads),
            num_kv_heads=small.key_value_heads(self.num_kv_heads),
            head_dim=small.head_dim,
            indexer=self.indexer.shrink(small) if self.indexer else None,
            temperature=self.temperature.shrink(small) if self.temperature else None,
        )

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for numbers of heads that do not divide, and for norms of queries and keys without a meaning."""
        heads, groups, hidden = self.num_heads, self.num_kv_heads, model.hidden_size
        is_given = getattr(model.attention, "head_dim", 0) > 0
        if not is_given and hidden % heads:
            yield Problem(
                "model.attention.num_heads",
                heads,
                f"must divide model.hidden_size={hidden} when model.attention.head_dim is 0",
                f"choose {nearest_numbers(heads, divisors(hidden))} heads, model.hidden_size="
                f"{nearest_multiples(hidden, heads)}, or set model.attention.head_dim",
            )
        if heads % groups:
            rule = f"must divide model.attention.num_heads={heads}"
            yield Problem(
                "model.attention.num_kv_heads", groups, rule, f"choose {nearest_numbers(groups, divisors(heads))}"
            )
        if self.has_rope and (is_given or hidden % heads == 0):
            yield from self._check_rope(is_given)
        if self.qk_norm:
            yield from self._check_norm(self.qk_norm, model)

    def _check_rope(self, is_given: bool) -> Iterator[Problem]:
        """Yield an error for an odd number of rotated dims: RoPE rotates pairs."""
        size = self.head_dim
        rotated = size * self.rope_fraction
        if size % 2 and is_given:
            way_out = f"choose {nearest_multiples(size, 2)}"
            yield Problem("model.attention.head_dim", size, "must be even, because RoPE rotates pairs", way_out)
        elif size % 2:
            yield Problem(
                "model.attention.num_heads",
                self.num_heads,
                f"makes heads of hidden_size/num_heads={size} dims, which must be even, because RoPE rotates pairs",
                f"set model.attention.head_dim to {nearest_multiples(size, 2)}",
            )
        elif abs(rotated - round(rotated)) > 1e-6 or round(rotated) % 2 or round(rotated) < 2:
            even = sorted(sorted(range(2, size + 1, 2), key=lambda dims: abs(dims - rotated))[:2])
            yield Problem(
                "model.attention.rope_fraction",
                self.rope_fraction,
                f"of a head of {size} is {rotated:g} dimensions, which must be a positive even number",
                f"choose {join_with_or([f'{dims / size:g} ({dims} dimensions)' for dims in even])}",
            )

    def _check_norm(self, norm: QueryKeyNorm, model: "ModelConfig") -> Iterator[Problem]:
        if norm.after_rope and norm.weight and model.rope.interleaved:
            yield Problem(
                "model.attention.qk_norm.after_rope",
                True,
                "is incompatible with model.rope.interleaved=true, whose rotation reorders the dims",
                "choose interleaved=false",
            )
        if norm.over_all_heads and not norm.weight:
            yield Problem(
                "model.attention.qk_norm.weight",
                False,
                "is incompatible with model.attention.qk_norm.over='all_heads', whose norm has weights",
                "set over='head'",
            )
        if norm.weight and not norm.in_nope:
            yield Problem(
                "model.attention.qk_norm.in_nope",
                False,
                "is incompatible with model.attention.qk_norm.weight=true: layers without RoPE would have other "
                "parameters than "
                "those with it",
                "set weight=false, or in_nope=true",
            )
        if norm.over_all_heads and model.norm.zero_centered:
            yield Problem(
                "model.norm.zero_centered",
                True,
                "is incompatible with model.attention.qk_norm.over='all_heads', a norm of another kind",
                "set zero_centered=false, or over='head'",
            )

    @property
    def fuses_head_norms(self) -> bool:
        """See base class."""
        norm = self.qk_norm
        has_norm = norm is not None and norm.weight and not norm.over_all_heads and not norm.after_rope
        return has_norm and self.has_rope

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `GroupedQueryAttention` or `SparseAttention`. See base class."""
        groups = self.num_kv_heads
        query = self.num_heads * self.head_dim
        key_value = groups * self.head_dim
        yield ParamSpec("wq", (query, hidden), "attention", tp_dim=0)
        yield ParamSpec("wk", (key_value, hidden), "attention", tp_dim=0, tp_heads=groups)
        yield ParamSpec("wv", (key_value, hidden), "attention", tp_dim=0, tp_heads=groups)
        yield ParamSpec("wo", (hidden, query), "attention", tp_dim=1, drawn="output")
        if self.qkv_bias:
            yield ParamSpec("bq", (query,), "attention", tp_dim=0)
            yield ParamSpec("bk", (key_value,), "attention", tp_dim=0, tp_heads=groups)
            yield ParamSpec("bv", (key_value,), "attention", tp_dim=0, tp_heads=groups)
        if self.output_bias:
            yield ParamSpec("bo", (hidden,), "attention")
        if self.sinks:
            yield ParamSpec("sinks", (self.num_heads,), "attention", tp_dim=0, drawn="normal")
        if self.gate:
            yield from self.gate.params(self.num_heads, self.head_dim, hidden)
        if self.qk_norm:
            yield from self.qk_norm.params(self.num_heads, groups, self.head_dim)
        if self.indexer:
            yield from prefixed("indexer", self.indexer.params(hidden, hidden))

    def core(self, hidden: int) -> AttentionCore:
        """Return the heads, and the key of the indexer if the layer has an indexer."""
        return AttentionCore(
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            key_width=self.head_dim,
            value_width=self.head_dim,
            cached_heads=self.num_kv_heads,
            cached_whole=self.indexer.key_width if self.indexer else 0,
            selected=self.indexer.top_k if self.indexer else 0,
            index_width=self.indexer.key_width if self.indexer else 0,
            index_flops=self.indexer.flops if self.indexer else 0,
        )

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of queries, keys and values, of their norms and of the core. See base class."""
        tp = sizes.parallel.tp
        query, key_value = self._widths(tp)
        saved = sizes.norm_with_output(saves_output=tp == 1, part="attention")
        saved["attention"] += sizes.gathered_bytes(query + key_value)
        if self.qk_norm:
            width = query + key_value // 2
            saved["norms"] += sizes.norm(sizes.gathered_tokens, width, full_width=self.qk_norm.over_all_heads)
            saved["norms"] += sizes.gathered_bytes(width)
        saved["attention"] += gate_bytes(self, sizes)
        saved += sizes.core_attention(self.num_heads // tp, self.head_dim)
        return saved + self.indexer.saved(sizes, key_value) if self.indexer else saved

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the projections. See base class."""
        tp = sizes.parallel.tp
        query, key_value = self._widths(tp)
        projected = 2 * query + self.num_heads // tp * self.gate_size + key_value
        return BytesByPart(attention=sizes.gathered_bytes(2 * sizes.hidden_size + projected))

    def transient(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of copies of the selected keys. See base class."""
        if not self.indexer:
            return BytesByPart()
        tp = sizes.parallel.tp
        key_value = self._widths(tp)[1]
        return self.indexer.transient(
            sizes, self.num_heads // tp, (key_value, key_value // 2), (SELECTION_COPIES, 2.65)
        )

    def _widths(self, tp: int) -> tuple[int, int]:
        """Return the widths of a rank's queries, and of its keys and values together."""
        groups = max(1, self.num_kv_heads // tp)
        return self.num_heads // tp * self.head_dim, 2 * groups * self.head_dim

    def build(self, frame: AttentionFrame) -> "GroupedQueryAttention":
        """Return the module. See base class."""
        if self.indexer:
            from moefold.parts.attention.gqa.sparse import SparseAttention

            return SparseAttention(self, frame)
        from moefold.parts.attention.gqa.module import GroupedQueryAttention

        return GroupedQueryAttention(self, frame)

    def formula(self) -> SoftmaxFormula:
        """Return the heads. See base class."""
        from moefold.parts.attention.gqa.oracle import heads

        return partial(heads, self)
