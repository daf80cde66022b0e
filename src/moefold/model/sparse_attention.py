"""Sparse attention of a layer: a lightning indexer selects the keys that each query attends to (arXiv:2512.02556).

Two stages (`train.indexer_stage`). warmup: attention is dense, all weights but the indexer's are frozen, and the
indexer learns the attention probabilities over all visible keys. sparse: each query attends to its selected keys, the
model learns from the language-model loss alone and the indexer from the attention probabilities over these keys alone.
"""

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.model.attention import Attention
from moefold.model.indexer import LightningIndexer
from moefold.model.mla import LatentAttention
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.ops.sparse_attention import sparse_attention


class SparseAttention(Attention):
    """Grouped-query attention over selected keys; the queries of the indexer come from the input of the layer.

    Args: as of `Attention`.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__(cfg, window)
        self.indexer = LightningIndexer(cfg, cfg.hidden_size, window)

    def _attend(
        self,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss; see base class."""
        indexer = self.indexer
        query, key, value = heads
        scale = self.scale or self.head_size**-0.5
        sinks = self._local_sinks(x)
        if indexer.is_dense:
            attended = super()._attend(x, heads, rope, documents)
            if not indexer.training:
                return attended
            index = indexer.project(x, x, rope)
            visible = indexer.visible_keys(len(query), documents, query.shape[1])
            all_keys = indexer.keys.gather(key)
            return indexer.attach_dense_loss(
                attended, index, visible, query, all_keys, documents, scale=scale, sinks=sinks
            )
        if indexer.cache is not None:
            index = indexer.project_rows(x, x, rope)
            keys, values, selected = indexer.cache.extend(index, key, value, indexer.top_k, self.window)
            return sparse_attention(query, keys, values, selected, value_dim=value.shape[-1], scale=scale, sinks=sinks)[
                0
            ]
        index = indexer.project(x, x, rope)
        selected = indexer.select(index, indexer.visible_keys(len(query), documents, query.shape[1]))
        keys, values = indexer.keys.gather(torch.cat((key, value), -1)).chunk(2, -1)
        attended, sums = sparse_attention(
            query, keys, values, selected, value_dim=value.shape[-1], scale=scale, sinks=sinks
        )
        return indexer.attach_selected_loss(attended, index, selected, sums, documents)


class SparseLatentAttention(LatentAttention):
    """Multi-head latent attention over selected keys, computed in the space of the latents, which all heads share.

    The queries of the indexer come from the query latent, or without one from the input of the layer.

    Args: as of `LatentAttention`.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__(cfg, window)
        self.indexer = LightningIndexer(cfg, cfg.q_lora_rank or cfg.hidden_size, window)

    def _attend(
        self,
        x: Tensor,
        own: tuple[Tensor, Tensor, Tensor],
        gathered: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss; see base class."""
        indexer = self.indexer
        if indexer.is_dense and not indexer.training:
            return super()._attend(x, own, gathered, rope, documents)
        source, latent, shared_key = gathered
        rank = latent.shape[-1]
        query = self._absorbed_queries(source, rope)
        key = self._latent_keys(latent, shared_key, rope).unsqueeze(2)
        if indexer.cache is not None:
            index = indexer.project_rows(x, own[0], rope)
            keys, _, selected = indexer.cache.extend(index, key, None, indexer.top_k, self.window)
            attended = sparse_attention(query, keys, None, selected, value_dim=rank, scale=self._scale)[0]
            return self._expand_values(attended)
        index = indexer.project(x, own[0], rope)
        visible = indexer.visible_keys(len(query), documents, query.shape[1])
        keys = indexer.keys.gather(key)
        if indexer.is_dense:
            attended = super()._attend(x, own, gathered, rope, documents)
            return indexer.attach_dense_loss(
                attended, index, visible, query, keys, documents, scale=self._scale, sinks=None
            )
        selected = indexer.select(index, visible)
        attended, sums = sparse_attention(query, keys, None, selected, value_dim=rank, scale=self._scale)
        return self._expand_values(indexer.attach_selected_loss(attended, index, selected, sums, documents))
