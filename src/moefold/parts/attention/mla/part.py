"""Multi-head latent attention (MLA, arXiv:2405.04434 sec. 2.1): keys and values of all heads come from one latent."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import MaxMagnitude, at_least
from moefold.config.base.limits import MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.small_sizes import SmallSizes
from moefold.config.chosen import chosen_in
from moefold.config.groups.attention import (
    AttentionCore,
    AttentionFrame,
    SoftmaxAttentionPart,
    SoftmaxFormula,
    gate_bytes,
    norm_param,
    prefixed,
)
from moefold.config.groups.context import ContextPart
from moefold.config.groups.indexer import SELECTION_COPIES
from moefold.cost.saved_tensors import BytesByPart
from moefold.message_text import Problem, nearest_multiples

if TYPE_CHECKING:
    from moefold.config.groups.layer_sizes import LayerSizes
    from moefold.config.model import ModelConfig
    from moefold.parts.attention.mla.module import LatentAttention


@dataclass(frozen=True, kw_only=True)
class MlaPart(SoftmaxAttentionPart):
    """Attend with heads projected from one latent (DeepSeek-V2), with an indexer in the space of the latents."""

    has_adapters: ClassVar[bool] = True
    has_score_factor: ClassVar[bool] = True
    own_recompute_parts: ClassVar[tuple[str, ...]] = ("mla_up",)
    q_lora_rank: Annotated[int, at_least(0, "0: no latent"), MaxMagnitude(MAX_WIDTH)] = 0
    """Width of the query latent. 0: queries are projected from the hidden state directly."""
    kv_lora_rank: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 64
    """Width of the key-value latent."""
    qk_nope_head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 32
    """Width of the part of a query and key head without RoPE."""
    qk_rope_head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 16
    """Width of the part of a query and key head with RoPE. All heads share its key."""
    v_head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 32
    """Width of a value head."""
    scale_latents: bool = False
    """Multiply the normalised latents by sqrt(hidden_size / rank): rank is q_lora_rank for the query latent and
    kv_lora_rank for the key-value latent (LongCat-Flash)."""

    def shrink(self, small: SmallSizes) -> Self:
        """Return the part with few heads, and widths that differ from each other."""
        return replace(
            self,
            num_heads=small.query_heads(self.num_heads, self.num_heads),
            q_lora_rank=small.head_dim + 4 if self.q_lora_rank else 0,
            kv_lora_rank=small.head_dim + 2,
            qk_nope_head_dim=small.head_dim - 2,
            qk_rope_head_dim=small.head_dim // 2,
            v_head_dim=small.head_dim,
            indexer=self.indexer.shrink(small) if self.indexer else None,
        )

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for norms and chunks that MLA does not have, and for an odd number of rotated dims."""
        if model.norm.zero_centered:
            rule = f"is incompatible with model.attention={self.kind!r}, whose latents have other norms"
            yield Problem("model.norm.zero_centered", True, rule, "set zero_centered=false, or attention='gqa'")
        if self.span and self.span.chunk:
            rule = f"has layers 'chunk', and model.attention={self.kind!r} has no chunks"
            yield Problem("model.layers", model.layers, rule, "choose 'full' or 'window'")
        dims = self.qk_rope_head_dim
        if self.has_rope and dims % 2:
            way_out = f"choose {nearest_multiples(dims, 2)}"
            yield Problem("model.attention.qk_rope_head_dim", dims, "must be even, because RoPE rotates pairs", way_out)

    @property
    def rotary_dim(self) -> int:
        """See base class."""
        return self.qk_rope_head_dim

    @property
    def head_dim(self) -> int:
        """Width of one query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.v_head_dim

    @property
    def key_width(self) -> int:
        """Width of the key that all heads share in the space of the latents."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of `LatentAttention` or `SparseLatentAttention`. See base class."""
        heads = self.num_heads
        query = heads * self.head_dim
        query_rank = self.q_lora_rank
        rank = self.kv_lora_rank
        # The shared key is a separate logical matrix, like the keys and the values of each head.
        down_rows = (rank, self.qk_rope_head_dim)
        up_rows = (self.qk_nope_head_dim, self.v_head_dim)
        if query_rank:
            yield ParamSpec("wq_down", (query_rank, hidden), "attention")
            yield ParamSpec("wq_up", (query, query_rank), "attention", tp_dim=0)
        else:
            yield ParamSpec("wq", (query, hidden), "attention", tp_dim=0)
        yield ParamSpec("wkv_down", (sum(down_rows), hidden), "attention", matrix_rows=down_rows)
        yield ParamSpec("wkv_up", (heads * sum(up_rows), rank), "attention", tp_dim=0, matrix_rows=up_rows)
        yield ParamSpec("wo", (hidden, heads * self.v_head_dim), "attention", tp_dim=1, drawn="output")
        if self.gate:
            yield from self.gate.params(heads, self.v_head_dim, hidden)
        if query_rank:
            yield norm_param("query_norm", query_rank)
        yield norm_param("key_value_norm", rank)
        if self.indexer:
            yield from prefixed("indexer", self.indexer.params(query_rank or hidden, hidden))

    def core(self, hidden: int) -> AttentionCore:
        """Return the heads. With an indexer these are the heads in the space of the latents, which share one key.

        The up projection of the keys and values is then multiplied with each query instead of each key: equal FLOPs.
        """
        if self.indexer:
            return AttentionCore(
                heads=self.num_heads,
                kv_heads=1,
                key_width=self.key_width,
                value_width=self.kv_lora_rank,
                cached_whole=self.key_width + self.indexer.key_width,
                cached_expanded=self._expanded_width,
                selected=self.indexer.top_k,
                values_in_keys=True,
                index_width=self.indexer.key_width,
                index_flops=self.indexer.flops,
            )
        return AttentionCore(
            heads=self.num_heads,
            kv_heads=self.num_heads,
            key_width=self.head_dim,
            value_width=self.v_head_dim,
            cached_whole=self.key_width,
            cached_expanded=self._expanded_width,
        )

    @property
    def _expanded_width(self) -> int:
        """Cached numbers of a head: keys and values are padded to one head dim."""
        return 2 * max(self.head_dim, self.v_head_dim)

    @property
    def recompute_parts(self) -> frozenset[str]:
        """The core, and the heads from the latents, where no indexer selects keys."""
        return frozenset() if self.indexer else frozenset({"core_attention", *self.own_recompute_parts})

    @property
    def index_source(self) -> int:
        """The query latent."""
        return self.q_lora_rank

    def up_weights(self, hidden: int) -> int:
        """Return the elements of the up projections. See base class."""
        values = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return 0 if self.indexer else self.num_heads * ((self.q_lora_rank or hidden) * self.head_dim + values)

    def saved(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the latents, and of the heads projected from them. See base class.

        With an indexer, return the bytes of the queries and outputs in the space of the latents.
        """
        heads = self.num_heads // sizes.parallel.tp
        hidden = sizes.hidden_size
        saved = sizes.norm_with_output(saves_output=sizes.parallel.tp == 1, part="attention")
        saved["attention"] += sizes.gathered_bytes((self.q_lora_rank or hidden) + self.key_width)
        saved["attention"] += sizes.tokens * sizes.item_bytes * (self.q_lora_rank + self.key_width)
        saved["norms"] += sizes.norm(sizes.tokens, self.q_lora_rank + self.kv_lora_rank)
        saved["attention"] += gate_bytes(self, sizes)
        if self.gate and self.q_lora_rank and sizes.parallel.tp > 1:
            # The norm's output. The gate's projection has its own all-gather of it.
            saved["attention"] += sizes.hidden_bytes
        if self.indexer:
            # Queries of the heads without RoPE, queries in the space of the latents, and values of the heads.
            widths = self.head_dim + self.key_width + self.v_head_dim
            saved["attention"] += sizes.gathered_bytes(heads * widths + self.key_width)
            saved += sizes.core_attention(heads, self.kv_lora_rank)
            return saved + self.indexer.saved(sizes, self.key_width)
        if "mla_up" not in sizes.recompute:
            saved["attention"] += sizes.gathered_bytes(heads * self._saved_head_widths(sizes))
        return saved + sizes.core_attention(heads, self.v_head_dim)

    def _saved_head_widths(self, sizes: "LayerSizes") -> int:
        """Return the saved numbers of a head for each token: of its query, its key and its value."""
        p = sizes.parallel
        context = chosen_in(p, ContextPart)
        attends_in_blocks = context.plan.shares_work or (p.cp > 1 and not context.shards_heads)
        takes_narrow = sizes.kernels.narrow_values and not attends_in_blocks and not sizes.has_windows
        if takes_narrow and self.v_head_dim <= self.head_dim:
            return 2 * self.head_dim + self.v_head_dim
        width = max(self.head_dim, self.v_head_dim)
        # Values without padding are saved with the non-rotated keys, because they are views of the same tensor.
        values = width if width > self.v_head_dim else self.qk_nope_head_dim + self.v_head_dim
        return 2 * width + values

    def delayed_wgrad(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of the projections. See base class.

        In the space of the latents, the gradient of `wkv_up` is not delayed.
        """
        per_head = (1 if self.indexer else 3) * self.head_dim + self.v_head_dim + self.gate_size
        heads = self.num_heads // sizes.parallel.tp * per_head
        return BytesByPart(attention=sizes.gathered_bytes(2 * sizes.hidden_size + heads))

    def transient(self, sizes: "LayerSizes") -> BytesByPart:
        """Return the bytes of copies of the selected keys. See base class."""
        if not self.indexer:
            return BytesByPart()
        heads = self.num_heads // sizes.parallel.tp
        return self.indexer.transient(sizes, heads, (self.key_width, self.key_width), (SELECTION_COPIES, 3.0))

    def build(self, frame: AttentionFrame) -> "LatentAttention":
        """Return the module. See base class."""
        if self.indexer:
            from moefold.parts.attention.mla.sparse import SparseLatentAttention

            return SparseLatentAttention(self, frame)
        from moefold.parts.attention.mla.module import LatentAttention

        return LatentAttention(self, frame)

    def formula(self) -> SoftmaxFormula:
        """Return the heads. See base class."""
        from moefold.parts.attention.mla.oracle import heads

        return partial(heads, self)
