"""Selection of the keys that a query of sparse attention attends to (arXiv:2512.02556)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from moefold.config.base.field import MaxMagnitude, at_least
from moefold.config.base.limits import MAX_SAMPLE_TOKENS, MAX_WIDTH
from moefold.config.base.param_spec import ParamSpec
from moefold.config.base.part import Part

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.base.small_sizes import SmallSizes
    from moefold.config.groups.layer_sizes import LayerSizes


INDEX_BYTES = 4
"""Bytes of the index of a selected key, int32."""
MAX_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of the largest temporary tensor of a block of queries by device type: a CPU caches it, a GPU needs few
launches."""
WARMUP_SCORE_COPIES = 4.9, 4.3
"""Temporary tensors of the scores of a block of queries in the warm-up of indexers, in float32 and in bfloat16, as
measured."""
SELECTION_COPIES = 2.25
"""Temporary numbers of a block over its copied keys and values (docs/log.md#2026-11-26-sparse-attention)."""
IndexerFormula = Callable[[Mapping[str, "Tensor"], "Tensor", "Tensor", Callable[["Tensor"], "Tensor"]], "Tensor"]
"""Scores of keys, [B, S queries, S keys]. Its arguments are the weights by name, the inputs of the keys [B, S, H] and
of the queries [B, S, ...], and the function that applies RoPE to the first dims of [B, S, D]."""


@dataclass(frozen=True, kw_only=True)
class IndexerPart(Part):
    """Source of the selected keys of a layer, with the sizes of the indexer that selects them."""

    group: ClassVar[str] = "indexer"
    framed: ClassVar[frozenset[str]] = frozenset({"top_k", "rope_interleaved"})
    is_shared: ClassVar[bool] = False
    """True if an earlier layer selects the keys."""
    top_k: Annotated[int, at_least(1), MaxMagnitude(MAX_SAMPLE_TOKENS)] = 2048
    """Maximum keys of a query of softmax attention."""
    num_heads: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 4
    """Heads of the indexer, J."""
    head_dim: Annotated[int, at_least(1), MaxMagnitude(MAX_WIDTH)] = 32
    """Width of a head of the indexer. Its first dims have RoPE, as many as a head of attention has."""
    rope_interleaved: bool = False
    """Pairing of the indexer's RoPE dims: 2i with 2i+1 (true, GLM-5), or i with i + half (false, DeepSeek-V3.2)."""

    def shrink(self, small: "SmallSizes") -> Self:
        """Return the indexer with few heads, and fewer selected keys than a window has: the selection has an effect."""
        return replace(
            self, top_k=min(self.top_k, small.span - 1), num_heads=min(self.num_heads, 3), head_dim=small.head_dim + 2
        )

    def params(self, source: int, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters of the layer's own indexer, which every tp rank has.

        Args:
            source: width of the input of its queries.
        """
        yield from ()

    def formula(self) -> IndexerFormula | None:
        """Return the formula of the selection scores, or None if an earlier layer selects the keys."""
        return None

    @property
    def key_width(self) -> int:
        """Width of the key of the layer's own indexer. 0: no indexer."""
        return 0 if self.is_shared else self.head_dim

    @property
    def flops(self) -> int:
        """FLOPs of the layer's own indexer for a query and a key: a product for each head, and their weighted sum."""
        return 0 if self.is_shared else 2 * self.num_heads * (self.head_dim + 1)

    def saved(self, sizes: "LayerSizes", key_width: int) -> Counter[str]:
        """Return the bytes of the gathered keys under cp, of the indexer's gradients, and of the layer's own selection.

        Args:
            key_width: numbers of the keys and values of a token on this rank.
        """
        p = sizes.parallel
        saved = self.index_bytes(sizes)
        if p.cp > 1:
            saved["core attention"] += p.cp * sizes.gathered_bytes(key_width)
        return saved if self.is_shared else saved + self.selection_bytes(sizes)

    def selection_bytes(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes of the indices of selected keys, stored once for layers with a shared selection."""
        selected = min(self.top_k, sizes.seq_len)
        return Counter({"core attention": sizes.gathered_tokens * selected * INDEX_BYTES})

    def index_bytes(self, sizes: "LayerSizes") -> Counter[str]:
        """Return the bytes of the queries, weights and keys of an indexer, or of their gradients."""
        num_bytes = self.num_heads * self.head_dim * sizes.item_bytes
        num_bytes += self.num_heads * sizes.high_precision_bytes + self.head_dim * sizes.item_bytes
        keys = sizes.parallel.cp * sizes.gathered_bytes(self.head_dim)
        return Counter(attention=sizes.tokens * num_bytes + keys)

    def saved_in_warmup(self, sizes: "LayerSizes", num_heads: int, source: int) -> Counter[str]:
        """Return the saved bytes of a layer in the warm-up, when only the indexers have gradients.

        The saved tensors are the inputs of the indexer's projections and norm, and the gradients of its loss. The keys'
        gradients are saved once for each block of queries.

        Args:
            source: width of the latent that is the input of the indexer's queries. 0: their input is the layer's input.
        """
        saved = self.index_bytes(sizes)
        # The loss keeps the gradients of the gathered keys, but no gradients of this rank's own keys.
        saved["attention"] -= sizes.tokens * self.head_dim * sizes.item_bytes
        p = sizes.parallel
        num_own = sizes.seq_len // (p.cp * p.tp)
        num_blocks = -(-num_own // self._warmup_block_rows(sizes, num_heads))
        saved["attention"] += (num_blocks - 1) * p.cp * sizes.gathered_bytes(self.head_dim)
        if not self.is_shared:
            widths = sizes.hidden_size + source + self.head_dim
            saved["attention"] += sizes.tokens * (widths * sizes.item_bytes + 2 * sizes.high_precision_bytes)
        return saved

    def warmup_loss_bytes(self, sizes: "LayerSizes", num_heads: int) -> int:
        """Return the temporary bytes of the loss over all visible keys, for the scores of a block of queries."""
        scores = self._warmup_block_rows(sizes, num_heads) * num_heads * sizes.seq_len * sizes.micro_batch_size
        copies = WARMUP_SCORE_COPIES[sizes.item_bytes < sizes.high_precision_bytes]
        return round(copies * scores * sizes.high_precision_bytes)

    def _warmup_block_rows(self, sizes: "LayerSizes", num_heads: int) -> int:
        """Return the queries of a block of this rank, as `LightningIndexer.dense_loss` divides them."""
        elements = max(num_heads, self.num_heads) * sizes.seq_len * sizes.micro_batch_size
        num_own = sizes.seq_len // (sizes.parallel.cp * sizes.parallel.tp)
        limit = MAX_BLOCK_ELEMENTS[sizes.kernels.device_type] // elements
        return max(1, min(num_own, limit))

    def transient(
        self, sizes: "LayerSizes", heads: int, widths: tuple[int, int], copies: tuple[float, float]
    ) -> Counter[str]:
        """Return the temporary bytes of a block of queries in the backward pass: copied keys and gradients.

        Args:
            heads: query heads of this rank.
            widths: copied numbers of a token, and the part of them that are keys.
            copies: ratio of temporary to copied numbers, in float32 and in bfloat16.
        """
        copied_width, key_width = widths
        selected = min(self.top_k, sizes.seq_len)
        rows_of_block = MAX_BLOCK_ELEMENTS[sizes.kernels.device_type] // (selected * max(key_width, heads))
        rows = max(1, min(sizes.seq_len // sizes.parallel.cp, rows_of_block))
        is_low_precision = sizes.item_bytes < sizes.high_precision_bytes
        numbers = copies[is_low_precision] * rows * selected * copied_width
        return Counter({"core attention": round(numbers * sizes.high_precision_bytes)})
