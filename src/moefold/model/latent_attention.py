"""Multi-head latent attention: keys and values of all heads come from one narrow vector (arXiv:2405.04434 sec. 2.1)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.schema import ModelConfig
from moefold.model.core_attention import CausalAttention, CoreAttention
from moefold.model.linear import linear
from moefold.model.norm import RMSNorm
from moefold.model.parameter import local
from moefold.model.recall import Recall, kept
from moefold.model.rope import Rotation, softmax_factor
from moefold.model.seams import Tokens, WholeTokens


class LatentAttention(nn.Module):
    """Latents of queries and of keys and values, their heads, rotation of a part, and the attention core.

    The latents are narrow: each rank makes those of its own tokens, with weights that tensor-parallel ranks hold
    whole, and the latents, not the hidden states, are gathered over tp. Heads are made behind that, from the local
    rows of `wq_up` (or `wq`) and `wkv_up`.

    `parallelize` replaces `tokens` (sequence parallelism), `core` (context parallelism) and `recall` (where heads are
    made again from the latents instead of being kept).

    Args:
        cfg: sizes and scaling.
        window: keys that a query of this layer sees at most, its own included; 0: no limit.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__()
        heads, hidden = cfg.num_attention_heads, cfg.hidden_size
        self.rotated_size = cfg.qk_rope_head_dim
        self.plain_size = cfg.qk_nope_head_dim
        self.value_size = cfg.v_head_dim
        query = heads * cfg.head_size
        self.wq = None if cfg.q_lora_rank else nn.Parameter(torch.empty(query, hidden))
        self.wq_down = nn.Parameter(torch.empty(cfg.q_lora_rank, hidden)) if cfg.q_lora_rank else None
        self.wq_up = nn.Parameter(torch.empty(query, cfg.q_lora_rank)) if cfg.q_lora_rank else None
        self.query_norm = RMSNorm(cfg.q_lora_rank, cfg.norm_eps) if cfg.q_lora_rank else None
        self.wkv_down = nn.Parameter(torch.empty(cfg.kv_lora_rank + cfg.qk_rope_head_dim, hidden))
        self.wkv_up = nn.Parameter(torch.empty(heads * (cfg.qk_nope_head_dim + cfg.v_head_dim), cfg.kv_lora_rank))
        self.key_value_norm = RMSNorm(cfg.kv_lora_rank, cfg.norm_eps)
        self.wo = nn.Parameter(torch.empty(hidden, heads * cfg.v_head_dim))
        self.tokens: Tokens = WholeTokens()
        self.window = window
        self.core: CoreAttention = CausalAttention(window)
        self.recall: Recall = kept
        # The core wants one width for all heads, and divides the scores by the root of that of the queries.
        self._width = max(cfg.head_size, cfg.v_head_dim)
        self._query_factor = softmax_factor(cfg) * (self._width / cfg.head_size) ** 0.5

    def forward(self, x: Tensor, rotation: Rotation, starts: Tensor | None = None) -> Tensor:
        """Attend over the whole sequence.

        Args:
            x: [S/(cp*tp), B, H].
            rotation: of the positions of this rank's context shard, S/cp tokens.
            starts: see `CoreAttention`, int64 [S, B].

        Returns:
            [S/(cp*tp), B, H].
        """
        source, latent, shared_key = self._gathered_latents(x)
        weight = self.wq if self.wq_up is None else self.wq_up
        assert weight is not None
        weights = local(weight, x.dtype), local(self.wkv_up, x.dtype)

        def heads(source: Tensor, latent: Tensor, shared_key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return self._heads((source, latent, shared_key), weights, rotation)

        with self.recall(heads, source, latent, shared_key, *weights) as (query, key, value):
            attended = self.core(query, key, value, starts)
        attended = attended[..., : self.value_size].flatten(2)
        return self.tokens.scatter(linear(attended, local(self.wo, x.dtype)))

    def _heads(
        self, parts: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, ...], rotation: Rotation
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values for the core, each [S/cp, B, heads of this rank, width], of the gathered latents."""
        source, latent, shared_key = parts
        query = linear(source, weights[0]).unflatten(-1, (-1, self.plain_size + self.rotated_size))
        key_value = linear(latent, weights[1]).unflatten(-1, (-1, self.plain_size + self.value_size))
        plain_query, rotated_query = query.split((self.plain_size, self.rotated_size), -1)
        plain_key, value = key_value.split((self.plain_size, self.value_size), -1)
        rotated_key = rotation(shared_key.unsqueeze(-2)).expand(*plain_key.shape[:-1], -1)
        query = torch.cat((plain_query, rotation(rotated_query)), -1)
        key = torch.cat((plain_key, rotated_key), -1)
        if self._query_factor != 1.0:
            query = query * self._query_factor
        return self._padded(query), self._padded(key), self._padded(value)

    def _gathered_latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries come from, the latent of keys and values, and the key that all heads share, each [S/cp, B, ...].

        One all-gather over tp.
        """
        source = x
        if self.wq_down is not None and self.query_norm is not None:
            source = self.query_norm(linear(x, local(self.wq_down, x.dtype)))
        latent, shared_key = linear(x, local(self.wkv_down, x.dtype)).split(
            (self.wkv_up.shape[1], self.rotated_size), -1
        )
        parts = source, self.key_value_norm(latent), shared_key
        return self.tokens.gather(torch.cat(parts, -1)).split([part.shape[-1] for part in parts], -1)

    def _padded(self, x: Tensor) -> Tensor:
        """Zeros add nothing to a score, and what they add to a value is cut off again."""
        missing = self._width - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x
