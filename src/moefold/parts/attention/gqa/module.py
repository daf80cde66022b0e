"""Module of grouped-query attention (GQA, arXiv:2305.13245)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from moefold.config.groups.attention import AttentionFrame
from moefold.model.attention import SelfAttention, gate_heads
from moefold.model.local_param import local_param
from moefold.model.norm import FullWidthQKNorm, HeadL2Norm, RMSNorm
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.decode import HeadWeights, LinearWeights
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.parts.attention.gqa.part import GqaPart

if TYPE_CHECKING:
    from moefold.model.indexer import Selection

FUSED_PARAMETERS = frozenset(
    ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "sinks", "query_norm.weight", "key_norm.weight")
)
"""Parameters that `fused_weights` returns."""


class GroupedQueryAttention(SelfAttention):
    """Grouped-query attention: QKV projections, RoPE, core attention, output projection.

    With more ranks of tp than key heads, `kv_rows` are the rows of wk and wv for this rank's query heads.
    """

    fused_refusal: ClassVar[str] = ""

    def __init__(self, part: GqaPart, frame: AttentionFrame) -> None:
        super().__init__(part.window)
        head = part.head_dim
        hidden = frame.hidden_size
        query = part.num_heads * head
        key_value = part.num_kv_heads * head
        self.head_size = head
        self.wq = nn.Parameter(torch.empty(query, hidden))
        self.wk = nn.Parameter(torch.empty(key_value, hidden))
        self.wv = nn.Parameter(torch.empty(key_value, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, query))
        self.bq = nn.Parameter(torch.empty(query)) if part.qkv_bias else None
        self.bk = nn.Parameter(torch.empty(key_value)) if part.qkv_bias else None
        self.bv = nn.Parameter(torch.empty(key_value)) if part.qkv_bias else None
        self.bo = nn.Parameter(torch.empty(hidden)) if part.output_bias else None
        self.sinks = nn.Parameter(torch.empty(part.num_heads)) if part.sinks else None
        gates = part.num_heads * part.gate_size
        self.wg = nn.Parameter(torch.empty(gates, hidden)) if gates else None
        self.gates_whole_heads = part.gate_size == 1
        self.query_norm = _qk_norm(part, frame, part.num_heads)
        self.key_norm = _qk_norm(part, frame, part.num_kv_heads)
        self.kv_rows = slice(None)
        self.scale = part.scale or None
        norm = part.qk_norm
        self.norm_after_rope = norm is not None and norm.after_rope
        self.normalizes_nope = norm is not None and norm.in_nope
        self._num_kv_heads = part.num_kv_heads

    def set_tp_rank(self, rank: int, tp: int) -> None:
        """Set `kv_rows`: with more ranks than key heads, wk and wv are replicated, and neighbours share a head."""
        heads = self._num_kv_heads
        if heads % tp:
            head = rank * heads // tp
            self.kv_rows = slice(head * self.head_size, (head + 1) * self.head_size)

    def forward(
        self,
        x: Tensor,
        rope: Rope | NoRope,
        documents: PackedDocuments | None = None,
        selection: "Selection | None" = None,
    ) -> Tensor:
        """Compute grouped-query attention, see `SelfAttention.forward`. For `selection` see `_attend`."""
        columns = [
            self.shard_of(self.wq, self.bq, slice(None), x.dtype),
            self.shard_of(self.wk, self.bk, self.kv_rows, x.dtype),
            self.shard_of(self.wv, self.bv, self.kv_rows, x.dtype),
        ]
        if self.wg is not None:
            columns.append((local_param(self.wg, x.dtype), None))
        projected = self.sequence_parallel.all_gather_linear(
            x, columns, self.wgrad_store, self.kernels.linear_backend, int(self.gates_whole_heads)
        )
        if self.lora is not None:
            names = ("wq", "wk", "wv", "wg")[: len(projected)]
            rows = {"wk": self.kv_rows, "wv": self.kv_rows}
            projected = self.lora.add_columns(projected, x, names, self.sequence_parallel, rows)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in projected[:3])
        query, key = self._normalize_and_rotate(query, key, rope)
        attended = self._attend(x, (query, key, value), rope, documents, selection)
        if self.wg is not None:
            attended = gate_heads(attended, projected[3])
        wo = local_param(self.wo, x.dtype)
        heads = attended.flatten(2)
        out = self.sequence_parallel.linear_reduce_scatter(heads, wo, self.wgrad_store, self.kernels.linear_backend)
        if self.lora is not None:
            out = self.lora.add_row(out, heads, "wo", self.sequence_parallel)
        return out if self.bo is None else out + local_param(self.bo, x.dtype)

    def _attend(
        self,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: "Selection | None" = None,
    ) -> Tensor:
        """Compute the core attention of queries, keys and values, [S/cp, B, heads of this rank, D] each.

        Args:
            x: input of the layer, [S/(cp*tp), B, H].
            heads: queries, keys and values.
            rope: RoPE of the positions of this rank's context shard.
            documents: see `CoreAttention`.
            selection: selection of sparse attention, if several layers share it.
        """
        return self.core_attention(*heads, documents, self._local_sinks(x), self.scale)

    def _local_sinks(self, x: Tensor) -> Tensor | None:
        """Return the sinks of this rank's heads in the type of x."""
        return None if self.sinks is None else local_param(self.sinks, x.dtype)

    def _normalize_and_rotate(self, query: Tensor, key: Tensor, rope: Rope | NoRope) -> tuple[Tensor, Tensor]:
        """Apply QK norm, if the layer has it, and RoPE to queries and keys, [S, B, heads, D] each."""
        if isinstance(rope, NoRope):
            if self.normalizes_nope:
                query, key = self._normalize(query, key)
            return rope.scale_queries(query), key
        if self.norm_after_rope:
            return self._normalize(rope(query), rope(key))
        fused = self.kernels.qk_norm_rope
        if fused is not None and isinstance(self.query_norm, RMSNorm) and isinstance(self.key_norm, RMSNorm):
            weights = self.query_norm.local_weight(query), self.key_norm.local_weight(key)
            return fused(
                query,
                key,
                weights,
                self.query_norm.eps,
                (rope.cos, rope.sin),
                is_interleaved=rope.is_interleaved,
            )
        query, key = self._normalize(query, key)
        return rope(query), rope(key)

    def _normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply QK norm, if the layer has it, to queries and keys, [S, B, heads, D] each."""
        if isinstance(self.query_norm, FullWidthQKNorm) and isinstance(self.key_norm, FullWidthQKNorm):
            return self.query_norm(query, slice(None)), self.key_norm(key, self.kv_rows)
        if isinstance(self.query_norm, RMSNorm) and isinstance(self.key_norm, RMSNorm):
            return self.query_norm(query), self.key_norm(key)
        if isinstance(self.query_norm, HeadL2Norm) and isinstance(self.key_norm, HeadL2Norm):
            return self.query_norm(query), self.key_norm(key)
        return query, key

    @staticmethod
    def shard_of(
        weight: Tensor, bias: Tensor | None, weight_rows: slice, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of this rank's heads."""
        weight = local_param(weight, dtype)
        bias = None if bias is None else local_param(bias, dtype)
        if weight_rows == slice(None):
            # The backward pass of a slice of all rows would cost a tensor of zeros and a copy.
            return weight, bias
        return weight[weight_rows], None if bias is None else bias[weight_rows]

    def fused_obstacles(self) -> Iterator[tuple[str, bool]]:
        """Yield the features that the kernel does not support. See base class."""
        yield "a layer of another class", type(self) is not GroupedQueryAttention
        kernel = self.kernels.decode
        assert kernel is not None
        yield "model.attention_multiplier", self.scale is not None
        yield "attention in chunks", bool(self.chunk_size)
        yield "QK norm after RoPE", self.norm_after_rope
        norms = self.query_norm, self.key_norm
        yield "QK norm of all heads", any(norm is not None and type(norm) is not RMSNorm for norm in norms)
        yield f"heads wider than {kernel.max_head_dim}", self.head_size > kernel.max_head_dim
        yield "tensor parallelism", type(self.sequence_parallel) is not SequenceParallel
        yield "heads of several ranks", self.kv_rows != slice(None)
        parameters = {name for name, _ in self.named_parameters()}
        yield "a gate of attention", "wg" in parameters
        yield "parameters of attention that it does not know", bool(parameters - FUSED_PARAMETERS)

    def fused_weights(self, like: Tensor) -> HeadWeights:
        """Return projections, norms of heads and sinks. See base class."""
        norms = self.query_norm, self.key_norm
        query_norm, key_norm = (norm if isinstance(norm, RMSNorm) else None for norm in norms)
        return HeadWeights(
            query=LinearWeights(*self.shard_of(self.wq, self.bq, slice(None), like.dtype)),
            key=LinearWeights(*self.shard_of(self.wk, self.bk, slice(None), like.dtype)),
            value=LinearWeights(*self.shard_of(self.wv, self.bv, slice(None), like.dtype)),
            output=LinearWeights(*self.shard_of(self.wo, self.bo, slice(None), like.dtype)),
            query_norm=None if query_norm is None else query_norm.local_weight(like),
            key_norm=None if key_norm is None else key_norm.local_weight(like),
            sinks=self._local_sinks(like),
            head_dim=self.head_size,
            window=self.window,
            query_key_eps=0.0 if query_norm is None else query_norm.eps,
        )


def _qk_norm(part: GqaPart, frame: AttentionFrame, num_heads: int) -> nn.Module | None:
    norm = part.qk_norm
    if norm is None:
        return None
    if norm.over_all_heads:
        return FullWidthQKNorm(num_heads * part.head_dim, frame.norm_eps, num_heads)
    if not norm.weight:
        return HeadL2Norm(frame.norm_eps)
    return RMSNorm(part.head_dim, frame.norm_eps, zero_centered=frame.zero_centered_norms)
