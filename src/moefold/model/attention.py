"""Causal self-attention with grouped queries (arXiv:2305.13245)."""

import torch
from torch import Tensor, nn

from moefold.config.schema import ModelConfig
from moefold.model.core_attention import CausalAttention, CoreAttention
from moefold.model.later import WeightGradStoreProtocol
from moefold.model.linear import LinearBackend
from moefold.model.norm import FullWidthQKNorm, RMSNorm
from moefold.model.parameter import local_param
from moefold.model.rope import Rope
from moefold.model.seams import NoSequenceParallel, SequenceParallel


class Attention(nn.Module):
    """Projections, rotation and the attention core. Head counts come from the sizes of the local weights.

    `parallelize` replaces `sequence_parallel` (sequence parallelism), `core_attention` (context parallelism), `wgrad_store` (a backward pass in
    two parts) and `kv_rows` (the rows of wk and wv that belong to this rank's query heads, where tp exceeds
    the number of query groups).

    Args:
        cfg: sizes, norms, biases and sinks.
        window: keys that a query of this layer sees at most, its own included; 0: no limit.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__()
        head, hidden = cfg.head_size, cfg.hidden_size
        query, key_value = cfg.num_attention_heads * head, cfg.num_query_groups * head
        self.head_size = head
        self.wq = nn.Parameter(torch.empty(query, hidden))
        self.wk = nn.Parameter(torch.empty(key_value, hidden))
        self.wv = nn.Parameter(torch.empty(key_value, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, query))
        self.bq = nn.Parameter(torch.empty(query)) if cfg.qkv_bias else None
        self.bk = nn.Parameter(torch.empty(key_value)) if cfg.qkv_bias else None
        self.bv = nn.Parameter(torch.empty(key_value)) if cfg.qkv_bias else None
        self.bo = nn.Parameter(torch.empty(hidden)) if cfg.attention_output_bias else None
        self.sinks = nn.Parameter(torch.empty(cfg.num_attention_heads)) if cfg.attention_sinks else None
        self.query_norm = _head_norm(cfg, query)
        self.key_norm = _head_norm(cfg, key_value)
        self.sequence_parallel: SequenceParallel = NoSequenceParallel()
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.linear_backend: LinearBackend | None = None
        self.window = window
        self.core_attention: CoreAttention = CausalAttention(window)
        self.kv_rows = slice(None)

    def forward(self, x: Tensor, rope: Rope, document_starts: Tensor | None = None) -> Tensor:
        """Attend over the whole sequence.

        Args:
            x: [S/(cp*tp), B, H].
            rope: of the positions of this rank's context shard, S/cp tokens.
            document_starts: see `CoreAttention`, int64 [S, B].

        Returns:
            [S/(cp*tp), B, H].
        """
        columns = [
            self._shard_of(self.wq, self.bq, slice(None), x.dtype),
            self._shard_of(self.wk, self.bk, self.kv_rows, x.dtype),
            self._shard_of(self.wv, self.bv, self.kv_rows, x.dtype),
        ]
        projected = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, self.linear_backend)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in projected)
        if isinstance(self.query_norm, FullWidthQKNorm) and isinstance(self.key_norm, FullWidthQKNorm):
            query, key = self.query_norm(query, slice(None)), self.key_norm(key, self.kv_rows)
        elif self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        sinks = None if self.sinks is None else local_param(self.sinks, x.dtype)
        attended = self.core_attention(rope(query), rope(key), value, document_starts, sinks)
        wo = local_param(self.wo, x.dtype)
        out = self.sequence_parallel.linear_reduce_scatter(
            attended.flatten(2), wo, self.wgrad_store, self.linear_backend
        )
        return out if self.bo is None else out + local_param(self.bo, x.dtype)

    @staticmethod
    def _shard_of(
        weight: Tensor, bias: Tensor | None, weight_rows: slice, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the heads of this rank."""
        return local_param(weight, dtype)[weight_rows], None if bias is None else local_param(bias, dtype)[weight_rows]


def _head_norm(cfg: ModelConfig, width: int) -> nn.Module | None:
    if not cfg.qk_norm:
        return None
    if cfg.qk_norm_width == "all_heads":
        return FullWidthQKNorm(width, cfg.norm_eps)
    return RMSNorm(cfg.head_size, cfg.norm_eps)
