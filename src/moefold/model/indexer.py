"""Lightning indexer of sparse attention: scores and selects the keys of each query (arXiv:2512.02556 sec. 2.1).

The indexer learns only from the KL divergence of its softmax from the attention probabilities: its inputs and its
target are detached, and a selection has no gradient.

Two stages (`train.indexer_stage`). warmup: attention is dense, and all weights except the indexer's are frozen. The
indexer learns the attention probabilities over all visible keys. sparse: each query attends to its selected keys. The
model learns only from the language-model loss, and the indexer only from the attention probabilities over these keys.

A layer without an indexer attends to the keys selected by the nearest earlier layer that has an indexer. That indexer
learns from the probabilities of both layers (`shared` in `model.layers`, arXiv:2603.12201).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefold.config.groups.indexer import IndexerPart
from moefold.model.gradient_paths import attach_aux_loss
from moefold.model.local_param import local_param
from moefold.model.norm import LayerNorm
from moefold.model.tp_interface import SampleShards, SequenceParallel
from moefold.ops.block_attention import accumulation_dtype
from moefold.ops.documents import PackedDocuments
from moefold.ops.rope import NoRope, Rope
from moefold.ops.sparse_attention import (
    IndexTensors,
    VisibleKeys,
    attention_sums,
    block_rows,
    select_keys,
    selected_index_loss,
    visible_index_loss,
)

if TYPE_CHECKING:
    from moefold.model.paged_selection import PagedSelection

INDEX_NORM_EPS = 1e-6
"""Epsilon of the norm of the indexer's keys, as in DeepSeek's code and transformers."""
IndexerStage = Literal["sparse", "warmup"]


class LightningIndexer(nn.Module):
    """Projections of the indexer, selection of keys, and the indexer's loss.

    Tensor parallelism splits its queries, not its heads: a rank scores its own tokens, [S/(cp*tp), B, ...], against all
    keys. `parallelize` replaces `sequence_parallel` and `shards` (context parallelism).

    Args:
        query_width: width of the input of the queries: the query latent, or the hidden state.
    """

    def __init__(self, part: IndexerPart, query_width: int, hidden: int, window: int) -> None:
        super().__init__()
        heads, head_dim = part.num_heads, part.head_dim
        self.wq = nn.Parameter(torch.empty(heads * head_dim, query_width))
        self.wk = nn.Parameter(torch.empty(head_dim, hidden))
        self.weights_proj = nn.Parameter(torch.empty(heads, hidden))
        self.key_norm = LayerNorm(head_dim, INDEX_NORM_EPS)
        self.top_k = part.top_k
        self.sliding_window = window
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.shards = SampleShards()
        self.stage: IndexerStage = "sparse"
        self.loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")
        """This rank's part of the loss of the step, with its coefficient. A micro-batch counts when its gradient
        passes: once, also if its forward pass is recomputed."""
        self._coefficient = 0.0
        self._loss_scale = 1.0
        self._head_dim = head_dim
        self._weight_scale = (heads * head_dim) ** -0.5
        self._is_interleaved = part.rope_interleaved

    def set_training(self, stage: IndexerStage, coefficient: float, num_micro_batches: int) -> None:
        """Set the stage, the coefficient of each layer's loss, and the number of micro-batches of a global batch."""
        self.stage = stage
        self._coefficient = coefficient
        self.set_micro_batches(num_micro_batches)

    def set_micro_batches(self, global_count: int) -> None:
        """Set the number of micro-batches of the next step in the global batch."""
        self._loss_scale = 1.0 / global_count

    def begin_step(self) -> None:
        """Reset the sum of the losses."""
        self.loss_sum.zero_()

    @property
    def is_dense(self) -> bool:
        """True if attention is dense, as in the warm-up stage, where only the indexer learns."""
        return self.stage == "warmup"

    @property
    def learns(self) -> bool:
        """True if losses are computed."""
        return self.training and self._coefficient > 0

    def project(self, x: Tensor, source: Tensor, rope: Rope | NoRope) -> IndexTensors:
        """Compute the projections: queries of this rank's own tokens, keys of whole samples.

        Communicates over tp and cp.

        Args:
            source: input of the queries, [S/(cp*tp), B, query_width].
            rope: RoPE of the S/cp positions of this rank's context shard.
        """
        query, weight, key = self._project_own(x, source)
        if isinstance(rope, Rope):
            rope = replace(rope, is_interleaved=self._is_interleaved)
            local_rows = self.sequence_parallel.local_rows
            query = replace(rope, cos=local_rows(rope.cos), sin=local_rows(rope.sin))(query)
        key = rope(self.sequence_parallel.gather(key).unsqueeze(2)).squeeze(2)
        return IndexTensors(query, weight, self.shards.gather(key))

    def project_rows(self, x: Tensor, source: Tensor, rope: Rope | NoRope) -> IndexTensors:
        """Compute the projections of the rows of a decoder's pass, on every rank of tp the projections of all rows."""
        query, weight, key = self._project_own(x, source)
        gather = self.sequence_parallel.gather
        query, key = gather(torch.cat((query.flatten(2), key), -1)).split((query.shape[2:].numel(), key.shape[-1]), -1)
        if isinstance(rope, Rope):
            rope = replace(rope, is_interleaved=self._is_interleaved)
        query = rope(query.unflatten(-1, (-1, self._head_dim)))
        return IndexTensors(query, gather(weight), rope(key.unsqueeze(2)).squeeze(2))

    def _project_own(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [S, B, J, D], weights [S, B, J] and keys [S, B, D] of this rank's own tokens, without RoPE."""
        x = x.detach()
        query = F.linear(source.detach(), local_param(self.wq, x.dtype)).unflatten(-1, (-1, self._head_dim))
        weight = F.linear(x, local_param(self.weights_proj, x.dtype)).to(accumulation_dtype(x.dtype))
        key = self.key_norm(F.linear(x, local_param(self.wk, x.dtype)))
        return query, weight * self._weight_scale, key

    def visible_keys(self, num_tokens: int, documents: PackedDocuments | None, num_samples: int) -> VisibleKeys:
        """Return the keys that the queries of this rank's context shard see, S/cp tokens."""
        device = self.wq.device if documents is None else documents.starts_SB.device
        positions = self.shards.positions(num_tokens, device)
        starts_SB = positions.new_zeros(num_tokens, num_samples)
        if documents is not None:
            starts_SB = documents.starts_SB[positions]
        if self.sliding_window:
            starts_SB = torch.maximum(starts_SB, (positions - self.sliding_window + 1).unsqueeze(1))
        stops_SB = (positions + 1).unsqueeze(1).expand_as(starts_SB)
        return VisibleKeys(starts_SB.int(), stops_SB.int())

    def select(self, index: IndexTensors, visible: VisibleKeys) -> Tensor:
        """Select the keys of all queries of the context shard, int32 [S/cp, B, K], by an all-gather over tp."""
        local_rows = self.sequence_parallel.local_rows
        visible_rows = VisibleKeys(local_rows(visible.starts_SB), local_rows(visible.stops_SB))
        return self.sequence_parallel.gather(select_keys(index, visible_rows, self.top_k))

    def attach_selected_loss(
        self,
        attended: Tensor,
        index: IndexTensors | None,
        selected_SBK: Tensor,
        sums_SBK: Tensor,
        documents: PackedDocuments | None,
    ) -> Tensor:
        """Return the attended values with the loss over the selected keys, by a reduce-scatter over tp.

        Args:
            attended: output of attention. Its gradient is unchanged.
            index: projections of this rank's own queries, or None where the indexer does not learn.
            selected_SBK: keys of the queries of the context shard, [S/cp, B, K].
            sums_SBK: attention probabilities summed over this rank's heads.
            documents: with the weights of the tokens, if there is padding.
        """
        if not self.learns:
            return attended
        assert index is not None
        own_selected = self.sequence_parallel.local_rows(selected_SBK)
        target = _normalized(self.sequence_parallel.scatter(sums_SBK))
        return self.attach(attended, selected_index_loss(index, own_selected, target, self._weights(index, documents)))

    def dense_loss(
        self,
        index: IndexTensors | None,
        visible: VisibleKeys,
        query: Tensor,
        key: Tensor,
        documents: PackedDocuments | None,
        *,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Return this rank's part of the loss over all visible keys, or None where the indexer does not learn.

        A reduce-scatter over tp for each block of queries.

        Args:
            query: queries of attention, [S/cp, B, A, D].
            key: keys of whole samples, [S, B, G, D].
            documents: with the weights of the tokens, if there is padding.
        """
        if not self.learns:
            return None
        assert index is not None
        num_own = len(index.query)
        num_keys = len(key)
        num_chunks = len(query) // num_own
        heads = max(query.shape[2] * num_chunks, index.query.shape[2])
        size = block_rows(index.query, heads * num_keys * query.shape[1])
        weights_SB = self._weights(index, documents)
        losses = []
        for start in range(0, num_own, size):
            stop = min(start + size, num_own)
            # Each rank of tp takes the same rows, so that each rank gets the sums of its own queries.
            rows = torch.cat([torch.arange(i * num_own + start, i * num_own + stop) for i in range(num_chunks)])
            rows = rows.to(query.device)
            keys = torch.arange(num_keys, device=query.device)
            starts_SB1 = visible.starts_SB[rows].unsqueeze(-1)
            is_visible_BSN = ((keys >= starts_SB1) & (keys < visible.stops_SB[rows].unsqueeze(-1))).transpose(0, 1)
            with torch.no_grad():
                sums = attention_sums(query[rows], key, is_visible_BSN, scale, sinks)
                target = _normalized(self.sequence_parallel.scatter(sums))
                is_visible_own = self.sequence_parallel.local_rows(is_visible_BSN.transpose(0, 1)).transpose(0, 1)
            block = IndexTensors(index.query[start:stop], index.weight[start:stop], index.key)
            losses.append(visible_index_loss(block, is_visible_own, target, weights_SB[start:stop]))
        return torch.stack(losses).sum()

    def _weights(self, index: IndexTensors, documents: PackedDocuments | None) -> Tensor:
        """Return the share of each of this rank's own queries in the loss, [S, B]: equal, or 0 for padding."""
        if documents is not None and documents.token_weights is not None:
            return self.sequence_parallel.local_rows(documents.token_weights.t())
        share = self._loss_scale / index.key.shape[:2].numel()
        return torch.full(index.query.shape[:2], share, dtype=torch.float64, device=index.query.device)

    def attach(self, attended: Tensor, loss: Tensor) -> Tensor:
        """Attach this rank's part of a loss to values, whose gradient is unchanged."""
        attached = attach_aux_loss(attended, loss, self._coefficient)
        if attached.requires_grad:
            term = loss.detach().double() * self._coefficient

            def count(grad: Any) -> None:
                if self.loss_sum.device != term.device:
                    self.loss_sum = self.loss_sum.to(term.device)
                self.loss_sum += term

            attached.register_hook(count)
        return attached


class Selection:
    """Selected keys of one micro-batch: a layer with an indexer sets them, later layers without an indexer read them.

    A recomputed layer sets the same keys again.
    """

    def __init__(self) -> None:
        self._indexer: LightningIndexer | None = None
        self._selected: Tensor | None = None
        self.index: IndexTensors | None = None
        """Projections for the losses of all layers, or None where the indexer does not learn."""
        self.dense_loss: Tensor | None = None
        """In the warm-up, the loss of the layer that runs, which `attach_dense_loss` takes."""

    @staticmethod
    def begin(indexer: LightningIndexer | None, shared: "Selection | None") -> "Selection":
        """Return the selection of a layer.

        Args:
            indexer: indexer of the layer, or None if an earlier layer selects.
            shared: selection that several layers share, or None if no other layer reads it.
        """
        selection = shared or Selection()
        selection._indexer = indexer or selection._indexer
        return selection

    @property
    def indexer(self) -> LightningIndexer:
        """The indexer that selects."""
        assert self._indexer is not None, "no earlier layer of this stage has an indexer"
        return self._indexer

    @property
    def selected(self) -> Tensor:
        """The selected keys, int32 [S/cp, B, K], or slots of a decoder's cache, [R, 1, K]."""
        assert self._selected is not None, "no keys are selected"
        return self._selected

    def attach_dense_loss(self, hidden: Tensor) -> Tensor:
        """Attach the loss of the layer that ran to its output, once."""
        loss = self.dense_loss
        self.dense_loss = None
        return hidden if loss is None else self.indexer.attach(hidden, loss)

    def select(
        self,
        indexer: LightningIndexer | None,
        inputs: tuple[Tensor, Tensor],
        rope: Rope | NoRope,
        visible: VisibleKeys,
    ) -> None:
        """Select keys, if the layer has an indexer. It communicates over tp and cp.

        Args:
            inputs: inputs of the layer and of the indexer's queries, [S/(cp*tp), B, ...].
            rope: RoPE of the positions of this rank's context shard.
        """
        if indexer is None:
            return
        index = indexer.project(*inputs, rope)
        # Without a loss no backward pass would free the graph of the projections.
        self.index = index if indexer.learns else None
        self._selected = None if indexer.is_dense else indexer.select(index, visible)

    def extend(
        self,
        indexer: LightningIndexer | None,
        inputs: tuple[Tensor, Tensor],
        rope: Rope | NoRope,
        cache: "PagedSelection",
        key_value: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Cache the rows of a decoder's pass, and select keys if the layer has an indexer.

        Args:
            key_value: key and value as for `PagedSelection.extend`.

        Returns:
            All cached keys and values.
        """
        if indexer is None:
            return cache.store(*key_value)
        index = indexer.project_rows(*inputs, rope)
        keys, values, self._selected = cache.extend(index, *key_value, indexer.top_k, indexer.sliding_window)
        return keys, values


def _normalized(sums: Tensor) -> Tensor:
    """Return sums divided by their total along the last dim."""
    return sums / sums.sum(-1, keepdim=True)
