"""Module of latent attention over the keys that a lightning indexer selects. See `model/indexer.py`."""

from torch import Tensor

from moefold.config.groups.attention import AttentionFrame
from moefold.model.indexer import LightningIndexer, Selection
from moefold.model.paged_selection import SelectingAttention
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.ops.sparse_attention import sparse_attention
from moefold.parts.attention.mla.module import LatentAttention
from moefold.parts.attention.mla.part import MlaPart


class SparseLatentAttention(SelectingAttention, LatentAttention):
    """Multi-head latent attention over selected keys, computed in the space of the latents, which all heads share.

    The queries of the indexer come from the query latent, or from the input of the layer if there is no latent.
    """

    def __init__(self, part: MlaPart, frame: AttentionFrame) -> None:
        super().__init__(part, frame)
        hidden = frame.hidden_size
        source = part.q_lora_rank or hidden
        indexer = part.own_indexer
        self.indexer = None if indexer is None else LightningIndexer(indexer, source, hidden, part.window)

    def _attend(
        self,
        x: Tensor,
        local: tuple[Tensor, Tensor, Tensor],
        gathered: tuple[Tensor, Tensor, Tensor],
        rope: Rope | NoRope,
        documents: PackedDocuments | None,
        selection: Selection | None = None,
    ) -> Tensor:
        """Compute attention over the selected keys, with the indexer's loss. See base class."""
        selection = Selection.begin(self.indexer, selection)
        indexer = selection.indexer
        if indexer.is_dense and not indexer.training:
            return super()._attend(x, local, gathered, rope, documents)
        source, latent, shared_key = gathered
        rank = latent.shape[-1]
        query = self._absorbed_queries(source, rope)
        key = self._latent_keys(latent, shared_key, rope).unsqueeze(2)
        inputs = x, local[0]
        if self.selected_keys is not None:
            keys, _ = selection.extend(self.indexer, inputs, rope, self.selected_keys, (key, None))
            attended = sparse_attention(query, keys, None, selection.selected, value_dim=rank, scale=self._scale)[0]
            return self._expand_values(attended)
        visible = indexer.visible_keys(len(query), documents, query.shape[1])
        selection.select(self.indexer, inputs, rope, visible)
        keys = indexer.shards.gather(key)
        if indexer.is_dense:
            selection.dense_loss = indexer.dense_loss(
                selection.index, visible, query, keys, documents, scale=self._scale, sinks=None
            )
            return super()._attend(x, local, gathered, rope, documents)
        attended, sums = sparse_attention(query, keys, None, selection.selected, value_dim=rank, scale=self._scale)
        attended = indexer.attach_selected_loss(attended, selection.index, selection.selected, sums, documents)
        return self._expand_values(attended)
