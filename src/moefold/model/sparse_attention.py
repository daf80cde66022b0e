"""Sparse attention of a layer: a lightning indexer selects the keys that each query attends to (arXiv:2512.02556).

Two stages (`train.indexer_stage`). warmup: attention is dense, all weights but the indexer's are frozen, and the
indexer learns the attention probabilities over all visible keys. sparse: each query attends to its selected keys, the
model learns from the language-model loss alone and the indexer from the attention probabilities over these keys alone.

A layer without an indexer attends to the keys that the nearest layer before it with one selected, and that indexer
learns from both layers' probabilities (`model.index_pattern`, arXiv:2603.12201).
"""

import torch
from torch import Tensor

from moefold.config.model import ModelConfig
from moefold.model.attention import Attention
from moefold.model.indexer import LightningIndexer, SelectedKeyCache, Selection
from moefold.model.mla import LatentAttention
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.ops.sparse_attention import sparse_attention


class SparseAttention(Attention):
    """Grouped-query attention over selected keys; the queries of the indexer come from the input of the layer.

    A decoder sets `selected_keys`.

    Args:
        cfg: as of `Attention`, and the sizes of the indexer.
        window: as of `Attention`.
        has_indexer: whether the layer selects keys; else it attends to the keys that an earlier layer selected.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0, *, has_indexer: bool = True) -> None:
        super().__init__(cfg, window)
        self.indexer = LightningIndexer(cfg, cfg.hidden_size, window) if has_indexer else None
        self.selected_keys: SelectedKeyCache | None = None

    def _attend(
        self,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss; see base class."""
        query, key, value = heads
        scale = self.scale or self.head_size**-0.5
        sinks = self._local_sinks(x)
        selection = Selection.begin(self.indexer, selection)
        indexer = selection.indexer
        if indexer.is_dense and not indexer.training:
            return super()._attend(x, heads, rope, documents)
        if self.selected_keys is not None:
            keys, values = selection.extend(self.indexer, (x, x), rope, self.selected_keys, (key, value))
            return sparse_attention(
                query, keys, values, selection.selected, value_dim=value.shape[-1], scale=scale, sinks=sinks
            )[0]
        visible = indexer.visible_keys(len(query), documents, query.shape[1])
        selection.select(self.indexer, (x, x), rope, visible)
        if indexer.is_dense:
            keys = indexer.keys.gather(key)
            selection.dense_loss = indexer.dense_loss(
                selection.index, visible, query, keys, documents, scale=scale, sinks=sinks
            )
            return super()._attend(x, heads, rope, documents)
        keys, values = indexer.keys.gather(torch.cat((key, value), -1)).chunk(2, -1)
        attended, sums = sparse_attention(
            query, keys, values, selection.selected, value_dim=value.shape[-1], scale=scale, sinks=sinks
        )
        return indexer.attach_selected_loss(attended, selection.index, selection.selected, sums, documents)


class SparseLatentAttention(LatentAttention):
    """Multi-head latent attention over selected keys, computed in the space of the latents, which all heads share.

    The queries of the indexer come from the query latent, or without one from the input of the layer. A decoder sets
    `selected_keys`.

    Args:
        cfg: as of `LatentAttention`, and the sizes of the indexer.
        window: as of `LatentAttention`.
        has_indexer: as of `SparseAttention`.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0, *, has_indexer: bool = True) -> None:
        super().__init__(cfg, window)
        self.indexer = LightningIndexer(cfg, cfg.q_lora_rank or cfg.hidden_size, window) if has_indexer else None
        self.selected_keys: SelectedKeyCache | None = None

    def _attend(
        self,
        x: Tensor,
        own: tuple[Tensor, Tensor, Tensor],
        gathered: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss; see base class."""
        selection = Selection.begin(self.indexer, selection)
        indexer = selection.indexer
        if indexer.is_dense and not indexer.training:
            return super()._attend(x, own, gathered, rope, documents)
        source, latent, shared_key = gathered
        rank = latent.shape[-1]
        query = self._absorbed_queries(source, rope)
        key = self._latent_keys(latent, shared_key, rope).unsqueeze(2)
        inputs = x, own[0]
        if self.selected_keys is not None:
            keys, _ = selection.extend(self.indexer, inputs, rope, self.selected_keys, (key, None))
            attended = sparse_attention(query, keys, None, selection.selected, value_dim=rank, scale=self._scale)[0]
            return self._expand_values(attended)
        visible = indexer.visible_keys(len(query), documents, query.shape[1])
        selection.select(self.indexer, inputs, rope, visible)
        keys = indexer.keys.gather(key)
        if indexer.is_dense:
            selection.dense_loss = indexer.dense_loss(
                selection.index, visible, query, keys, documents, scale=self._scale, sinks=None
            )
            return super()._attend(x, own, gathered, rope, documents)
        attended, sums = sparse_attention(query, keys, None, selection.selected, value_dim=rank, scale=self._scale)
        attended = indexer.attach_selected_loss(attended, selection.index, selection.selected, sums, documents)
        return self._expand_values(attended)
