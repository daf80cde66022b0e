"""Module of multi-head latent attention (MLA, arXiv:2405.04434 sec. 2.1)."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.groups.attention import AttentionCore, AttentionFrame
from moefold.model.activation_checkpoint import OutputCheckpoint, no_checkpoint
from moefold.model.attention import SelfAttention, gate_heads, sdpa_supports_narrow_values
from moefold.model.indexer import Selection
from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache
from moefold.model.linear import LinearBackend, UnquantizedLinear, linear
from moefold.model.local_param import local_param
from moefold.model.norm import RMSNorm
from moefold.model.paged_cache import PagedLatents
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.parts.attention.mla.part import MlaPart

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, independent of `norm_eps`, as in DeepSeek's code and transformers."""


class LatentAttention(SelfAttention):
    """Multi-head latent attention: down and up projections, partial RoPE, and core attention.

    The latents are low-dimensional: each rank computes the latents of its own tokens, with weights replicated over tp,
    and the latents, not the hidden states, are all-gathered over tp. Heads are then computed from the local rows of
    `wq_up` (or `wq`) and `wkv_up`.

    `parallelize` also replaces `mla_up_checkpoint` (recompute heads from the latents instead of saving them). With
    `latent_cache` all attention reads latents, also of the same pass, and no heads are computed from them (weight
    absorption, arXiv:2405.04434 sec. 2.1.2).
    """

    fused_refusal: ClassVar[str] = "latent attention"

    def __init__(self, part: MlaPart, frame: AttentionFrame) -> None:
        super().__init__(part.window)
        heads, hidden = part.num_heads, frame.hidden_size
        query_rank, rank = part.q_lora_rank, part.kv_lora_rank
        head, value = part.head_dim, part.v_head_dim
        self.qk_rope_head_dim = part.qk_rope_head_dim
        self.qk_nope_head_dim = part.qk_nope_head_dim
        self.v_head_dim = value
        query = heads * head
        self.wq = None if query_rank else nn.Parameter(torch.empty(query, hidden))
        self.wq_down = nn.Parameter(torch.empty(query_rank, hidden)) if query_rank else None
        self.wq_up = nn.Parameter(torch.empty(query, query_rank)) if query_rank else None
        self.query_norm = RMSNorm(query_rank, LATENT_NORM_EPS) if query_rank else None
        self.wkv_down = nn.Parameter(torch.empty(rank + part.qk_rope_head_dim, hidden))
        self.wkv_up = nn.Parameter(torch.empty(heads * (part.qk_nope_head_dim + value), rank))
        self.key_value_norm = RMSNorm(rank, LATENT_NORM_EPS)
        self.wo = nn.Parameter(torch.empty(hidden, heads * value))
        gates = heads * part.gate_size
        self.wg = nn.Parameter(torch.empty(gates, hidden)) if gates else None
        self.gates_whole_heads = part.gate_size == 1
        self.mla_up_checkpoint: OutputCheckpoint = no_checkpoint
        self.latent_cache: PagedLatents | None = None
        # The factor scales the latent of the queries. Without a latent their input is the hidden state: no factor.
        has_query_latent = part.scale_latents and query_rank > 0
        self._query_latent_scale = (hidden / query_rank) ** 0.5 if has_query_latent else 1.0
        self._latent_scale = (hidden / rank) ** 0.5 if part.scale_latents else 1.0
        self._scale = frame.score_factor / head**0.5
        self._padded_head_dim = max(head, value)
        self._has_wide_values = value > head
        self._query_factor = frame.score_factor * (self._padded_head_dim / head) ** 0.5

    def open_caches(self, current_pass: CurrentPass, size: CacheSize) -> list[LayerCache]:
        """Cache latents, or heads. See base class."""
        if size.kind == "heads":
            return super().open_caches(current_pass, size)
        self.latent_cache = PagedLatents(current_pass, size.num_pages, size.page_positions, self.window)
        return [self.latent_cache]

    def close_caches(self) -> None:
        """See base class."""
        super().close_caches()
        self.latent_cache = None

    def head_sizes(self, core: AttentionCore, device: torch.device) -> tuple[int, int]:
        """Return the dims of the heads that are computed from the latents. See base class."""
        padded = self._padded_head_dim
        return (padded, padded) if self._pads_heads(device, None) else super().head_sizes(core, device)

    def forward(
        self,
        x: Tensor,
        rope: Rope | NoRope,
        documents: PackedDocuments | None = None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute latent attention, see `SelfAttention.forward`. For `selection` see `_attend`."""
        local = self._latents(x)
        gathered = self._all_gather_latents(local)
        attended = self._attend(x, local, gathered, rope, documents, selection)
        if self.wg is not None:
            attended = gate_heads(attended, self._gate(x, gathered[0], self.wg))
        wo = local_param(self.wo, x.dtype)
        heads = attended.flatten(2)
        out = self.sequence_parallel.linear_reduce_scatter(heads, wo, self.wgrad_store, self.kernels.linear_backend)
        return out if self.lora is None else self.lora.add_row(out, heads, "wo", self.sequence_parallel)

    def _attend(
        self,
        x: Tensor,
        local: tuple[Tensor, Tensor, Tensor],
        gathered: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute attention from the latents.

        Args:
            x: input of the layer, [S/(cp*tp), B, H].
            local: input of the query heads, KV latent and shared key of the same tokens.
            gathered: the same values for all tokens of the context shard, [S/cp, B, ...].
            rope: RoPE of the positions of this rank's context shard.
            documents: see `CoreAttention`.
            selection: selection of sparse attention, if several layers share it.

        Returns:
            [S/cp, B, A, v].
        """
        source, latent, shared_key = gathered
        if self.latent_cache is None:
            return self._expanded_attention(gathered, local_param(self._query_weight, x.dtype), rope, documents)
        self.latent_cache.add(self._latent_keys(latent, shared_key, rope))
        attended = self.latent_cache.attend(self._absorbed_queries(source, rope), self.wkv_up.shape[1], self._scale)
        return self._expand_values(attended)

    @property
    def _query_name(self) -> str:
        return "wq" if self.wq_up is None else "wq_up"

    @property
    def _query_weight(self) -> Tensor:
        weight = self.wq if self.wq_up is None else self.wq_up
        assert weight is not None
        return weight

    def _gate(self, x: Tensor, source: Tensor, weight: Tensor) -> Tensor:
        """Return the gates of the output, [S/cp, B, A or A * v], by an all-gather over tp if queries have a latent."""
        if self.wq_down is None:
            return self._project(source, weight, "wg")
        columns = [(local_param(weight, x.dtype), None)]
        gates = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, self._backend("wg"))
        if self.lora is not None:
            gates = self.lora.add_columns(gates, x, ("wg",), self.sequence_parallel)
        return gates[0]

    def _expanded_attention(
        self,
        latents: tuple[Tensor, Tensor, Tensor],
        query_weight: Tensor,
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
    ) -> Tensor:
        """Compute heads from the gathered latents and run core attention, [S, B, A, v]."""
        # A recomputation has its own graph, whose weight gradients cannot be delayed.
        wgrad_store = self.wgrad_store if self.mla_up_checkpoint is no_checkpoint else None
        pads_heads = self._pads_heads(latents[0].device, documents)

        def compute_heads(source: Tensor, latent: Tensor, shared_key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            backend = self.kernels.linear_backend
            query = linear(source, weights[0], wgrad_store=wgrad_store, linear_backend=backend)
            key_value = linear(latent, weights[1], wgrad_store=wgrad_store, linear_backend=backend)
            if self.lora is not None:
                adapters = iter(weights[2:])
                query, key_value = (
                    self.lora.add_pair(y, x, next(adapters), next(adapters)) if name in self.lora else y
                    for y, x, name in ((query, source, self._query_name), (key_value, latent, "wkv_up"))
                )
            query = query.unflatten(-1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim))
            key_value = key_value.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
            query, key, value = self._expand_heads(query, key_value, shared_key, rope)
            if pads_heads:
                return self._pad_heads(query, key, value)
            # A copy of the values, so that backward does not save the non-rotated keys too.
            return query, key, value.contiguous()

        weights = [query_weight, local_param(self.wkv_up, query_weight.dtype)]
        if self.lora is not None:
            adapted = [name for name in (self._query_name, "wkv_up") if name in self.lora]
            weights += [part for name in adapted for part in self.lora.pair(name, query_weight.dtype)]
        with self.mla_up_checkpoint(compute_heads, *latents, *weights) as (query, key, value):
            attended = self.core_attention(query, key, value, documents, None, None if pads_heads else self._scale)
        return attended[..., : self.v_head_dim] if pads_heads else attended

    def _pads_heads(self, device: torch.device, documents: PackedDocuments | None) -> bool:
        """Return whether core attention needs one head dim for q, k and v, and scales scores by its inverse root.

        SDPA takes narrower values and a scale if only causality limits attention. Windows, several documents and the
        blocks of context parallelism have kernels of one head dim.
        """
        has_limits = self.window > 0 or (documents is not None and documents.divide(0, len(documents.starts_SB)))
        return not sdpa_supports_narrow_values(device) or self.attends_in_blocks or has_limits or self._has_wide_values

    def _expand_heads(
        self, query: Tensor, key_value: Tensor, shared_key: Tensor, rope: Rope | NoRope
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, each [S/cp, B, heads of this rank, its head dim]."""
        query_nope, query_rope = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        key_nope, value = key_value.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        rotated_key = rope(shared_key.unsqueeze(-2)).expand(*key_nope.shape[:-1], -1)
        query = torch.cat((query_nope, rope(query_rope)), -1)
        key = torch.cat((key_nope, rotated_key), -1)
        return query, key, value

    def _pad_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pad heads to one head dim, and fold the scale of the scores into the queries."""
        if self._query_factor != 1.0:
            query = query * self._query_factor
        return self._pad_head_dim(query), self._pad_head_dim(key), self._pad_head_dim(value)

    @staticmethod
    def _latent_keys(latent: Tensor, shared_key: Tensor, rope: Rope | NoRope) -> Tensor:
        """Return the keys of all heads in the space of the latents: latent and rotated key, [S, B, latent + rope]."""
        return torch.cat((latent, rope(shared_key.unsqueeze(-2)).squeeze(-2)), -1)

    def _absorbed_queries(self, source: Tensor, rope: Rope | NoRope) -> Tensor:
        """Return the queries in the space of the latents, with the up projection of the keys absorbed.

        (W_k c)^T q = c^T (W_k^T q), so that all heads share the same keys.

        Args:
            source: input of the query heads, [S, B, ...].

        Returns:
            [S, B, A, latent + rope].
        """
        query = self._project(source, self._query_weight, self._query_name).unflatten(
            -1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim)
        )
        nope, rotated = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        absorbed = torch.einsum("sbap,apr->sbar", nope, self._up_projections(source.dtype)[0])
        return torch.cat((absorbed, rope(rotated)), -1)

    def _expand_values(self, latent_SBAR: Tensor) -> Tensor:
        """Return the values of the heads, [S, B, A, v], from averages of latents."""
        return torch.einsum("sbar,avr->sbav", latent_SBAR, self._up_projections(latent_SBAR.dtype)[1])

    def _up_projections(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the up projections of the keys [A, nope, latent] and of the values [A, v, latent]."""
        up = local_param(self.wkv_up, dtype)
        if self.lora is not None and "wkv_up" in self.lora:
            up = up + self.lora.product("wkv_up", dtype)
        up_AOR = up.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        key_up, value_up = up_AOR.split((self.qk_nope_head_dim, self.v_head_dim), 1)
        return key_up, value_up

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the input of the query heads, the KV latent, and the key shared by all heads, of this rank's tokens.

        [S/(cp*tp), B, ...] each.
        """
        source = x
        if self.wq_down is not None and self.query_norm is not None:
            source = self.query_norm(self._project(x, self.wq_down, "wq_down"))
        latent, shared_key = self._project(x, self.wkv_down, "wkv_down").split(
            (self.wkv_up.shape[1], self.qk_rope_head_dim), -1
        )
        latent = self.key_value_norm(latent)
        if self._query_latent_scale != 1.0:
            source = source * self._query_latent_scale
        if self._latent_scale != 1.0:
            latent = latent * self._latent_scale
        return source, latent, shared_key

    def _all_gather_latents(self, local: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the latents of all tokens of the context shard, [S/cp, B, ...] each, by one all-gather over tp."""
        source, latent, shared_key = self.sequence_parallel.gather(torch.cat(local, -1)).split(
            [part.shape[-1] for part in local], -1
        )
        return source, latent, shared_key

    def _project(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Apply a matrix, and its adapter if it has one, to the same tokens. It does not communicate."""
        y = linear(x, local_param(weight, x.dtype), wgrad_store=self.wgrad_store, linear_backend=self._backend(name))
        return y if self.lora is None else self.lora.add(y, x, name)

    def _backend(self, name: str) -> LinearBackend | None:
        """Return the GEMMs of a matrix. Gates of whole heads have too few rows to be quantised."""
        backend = self.kernels.linear_backend
        is_exact = name == "wg" and self.gates_whole_heads
        return None if is_exact and not isinstance(backend, UnquantizedLinear) else backend

    def _pad_head_dim(self, x: Tensor) -> Tensor:
        """Pad the head dim with zeros, which add nothing to scores. Padded columns of the output are dropped."""
        missing = self._padded_head_dim - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x
