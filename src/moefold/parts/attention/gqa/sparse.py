"""Module of grouped-query attention over the keys that a lightning indexer selects. See `model/indexer.py`."""

import torch
from torch import Tensor

from moefold.config.groups.attention import AttentionFrame
from moefold.model.indexer import LightningIndexer, Selection
from moefold.model.paged_selection import SelectingAttention
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.ops.sparse_attention import sparse_attention
from moefold.parts.attention.gqa.module import GroupedQueryAttention
from moefold.parts.attention.gqa.part import GqaPart


class SparseAttention(SelectingAttention, GroupedQueryAttention):
    """Grouped-query attention over selected keys. The queries of the indexer come from the input of the layer."""

    def __init__(self, part: GqaPart, frame: AttentionFrame) -> None:
        super().__init__(part, frame)
        hidden = frame.hidden_size
        indexer = part.own_indexer
        self.indexer = None if indexer is None else LightningIndexer(indexer, hidden, hidden, part.window)

    def _attend(
        self,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss. See base class."""
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
            keys = indexer.shards.gather(key)
            selection.dense_loss = indexer.dense_loss(
                selection.index, visible, query, keys, documents, scale=scale, sinks=sinks
            )
            return super()._attend(x, heads, rope, documents)
        keys, values = indexer.shards.gather(torch.cat((key, value), -1)).chunk(2, -1)
        attended, sums = sparse_attention(
            query, keys, values, selection.selected, value_dim=value.shape[-1], scale=scale, sinks=sinks
        )
        return indexer.attach_selected_loss(attended, selection.index, selection.selected, sums, documents)
