"""Causal self-attention with grouped queries (arXiv:2305.13245)."""

import torch
from torch import Tensor, nn

from moefold.config.schema import ModelConfig
from moefold.model.core_attention import CausalAttention, CoreAttention
from moefold.model.later import Later
from moefold.model.linear import Products
from moefold.model.norm import AllHeadsNorm, RMSNorm
from moefold.model.parameter import local
from moefold.model.rope import Rotation
from moefold.model.seams import Tokens, WholeTokens


class Attention(nn.Module):
    """Projections, rotation and the attention core. Head counts come from the sizes of the local weights.

    `parallelize` replaces `tokens` (sequence parallelism), `core` (context parallelism), `later` (a backward pass in
    two parts) and `key_value_rows` (the rows of wk and wv that belong to this rank's query heads, where tp exceeds
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
        self.tokens: Tokens = WholeTokens()
        self.later: Later | None = None
        self.products: Products | None = None
        self.window = window
        self.core: CoreAttention = CausalAttention(window)
        self.key_value_rows = slice(None)

    def forward(self, x: Tensor, rotation: Rotation, starts: Tensor | None = None) -> Tensor:
        """Attend over the whole sequence.

        Args:
            x: [S/(cp*tp), B, H].
            rotation: of the positions of this rank's context shard, S/cp tokens.
            starts: see `CoreAttention`, int64 [S, B].

        Returns:
            [S/(cp*tp), B, H].
        """
        columns = [
            self._columns(self.wq, self.bq, slice(None), x.dtype),
            self._columns(self.wk, self.bk, self.key_value_rows, x.dtype),
            self._columns(self.wv, self.bv, self.key_value_rows, x.dtype),
        ]
        projected = self.tokens.gathered_products(x, columns, self.later, self.products)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in projected)
        if isinstance(self.query_norm, AllHeadsNorm) and isinstance(self.key_norm, AllHeadsNorm):
            query, key = self.query_norm(query, slice(None)), self.key_norm(key, self.key_value_rows)
        elif self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        sinks = None if self.sinks is None else local(self.sinks, x.dtype)
        attended = self.core(rotation(query), rotation(key), value, starts, sinks)
        wo = local(self.wo, x.dtype)
        out = self.tokens.scattered_product(attended.flatten(2), wo, self.later, self.products)
        return out if self.bo is None else out + local(self.bo, x.dtype)

    @staticmethod
    def _columns(weight: Tensor, bias: Tensor | None, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the heads of this rank."""
        return local(weight, dtype)[rows], None if bias is None else local(bias, dtype)[rows]


def _head_norm(cfg: ModelConfig, width: int) -> nn.Module | None:
    if not cfg.qk_norm:
        return None
    if cfg.qk_norm_width == "all_heads":
        return AllHeadsNorm(width, cfg.norm_eps)
    return RMSNorm(cfg.head_size, cfg.norm_eps)
