"""Sparse attention: each query attends to the keys that an indexer selects (DeepSeek-V3.2, arXiv:2512.02556 sec. 2.1).

The score of key s for query t is I[t, s] = sum over heads j of w[t, j] * ReLU(q[t, j] . k[s]). Every function runs over
blocks of queries, so its temporary memory does not grow with the number of queries. Sums are in float32 at least.

Letters: S queries of this rank, N keys of the whole sample, K selected keys of a query, J heads of the indexer. Keys
and selections are rows of the key tensors. -1 marks an empty place of a selection.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.config.groups.indexer import MAX_BLOCK_ELEMENTS
from moefold.ops.block_attention import accumulation_dtype, fold_in_sinks, sink_gradient
from moefold.ops.exact_topk import exact_topk


@dataclass(frozen=True)
class IndexTensors:
    """Projections of an indexer."""

    query: Tensor
    """[S, B, J, D]."""
    weight: Tensor
    """Weight of each head, with the scale of the scores, [S, B, J]."""
    key: Tensor
    """[N, B, D]."""


@dataclass(frozen=True)
class VisibleKeys:
    """Range of keys that each query may attend to: `starts` <= key < `stops`."""

    starts_SB: Tensor
    """int32."""
    stops_SB: Tensor
    """int32."""

    def mask(self, rows: slice, sample: int, num_keys: int) -> Tensor:
        """Return the mask of the first keys that the queries of a block see, bool [rows, num_keys]."""
        keys = torch.arange(num_keys, device=self.starts_SB.device)
        starts = self.starts_SB[rows, sample].unsqueeze(1)
        return (keys >= starts) & (keys < self.stops_SB[rows, sample].unsqueeze(1))

    def limit(self, rows: slice, sample: int, num_keys: int) -> int:
        """Return the end of the keys that any query of a block sees, or all keys where the host would have to wait."""
        if self.stops_SB.device.type != "cpu":
            return num_keys
        return int(self.stops_SB[rows, sample].max())


def index_scores(query_RJD: Tensor, weight_RJ: Tensor, key_ND: Tensor) -> Tensor:
    """Compute the scores of all keys for some queries, [R, N], in float32 at least."""
    dtype = accumulation_dtype(query_RJD.dtype)
    dots_RJN = (query_RJD.to(dtype) @ key_ND.to(dtype).t()).relu_()
    return (weight_RJ.to(dtype).unsqueeze(1) @ dots_RJN).squeeze(1)


@torch.no_grad()
def select_keys(index: IndexTensors, visible: VisibleKeys, top_k: int) -> Tensor:
    """Select the keys with the highest scores among the keys that each query sees. The lowest key wins ties.

    A score that is not a number counts as minus infinity. The loss of the indexer is then not a number either.

    Args:
        index: projections of the queries and of all keys.
        visible: keys that each query sees. Every query sees at least one key.
        top_k: maximum number of keys of a query.

    Returns:
        Selected keys in ascending order, then -1, int32 [S, B, min(top_k, N)].
    """
    num_keys = len(index.key)
    heads = index.query.shape[2]
    key_ids = index.query.new_empty(*index.query.shape[:2], min(top_k, num_keys), dtype=torch.int32)
    for rows, sample in _blocks(index.query, heads * num_keys):
        limit = visible.limit(rows, sample, num_keys)
        scores = index_scores(index.query[rows, sample], index.weight[rows, sample], index.key[:limit, sample])
        scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bounds = (x[rows, sample].contiguous() for x in (visible.starts_SB, visible.stops_SB))
        starts, stops = bounds
        key_ids[rows, sample] = exact_topk(scores, key_ids.shape[2], starts=starts, stops=stops)
    return key_ids


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    selected_SBK: Tensor,
    *,
    value_dim: int,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention of each query over its selected keys. It does not communicate.

    Args:
        q: queries, [S, B, A, D].
        k: keys, [N, B, G, D]. Query head a reads head a // (A/G).
        v: values, [N, B, G, Dv]. None means the first `value_dim` dims of the keys.
        selected_SBK: keys of each query, int32 [S, B, K], -1 in empty places. Each query has at least one key.
        value_dim: Dv.
        scale: factor of the scores.
        sinks: logit of each query head that takes part in the softmax without a value, [A].

    Returns:
        Output [S, B, A, Dv] in the type of the queries, and the probability of each selected key summed over the heads,
        [S, B, K], without gradient.
    """
    out, sums = _SparseAttention.apply(q, k, v, selected_SBK, sinks, value_dim, scale)
    return out, sums


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        selected_SBK: Tensor,
        sinks: Tensor | None,
        value_dim: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        out = q.new_empty(*q.shape[:3], value_dim)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        sums = q.new_empty(selected_SBK.shape, dtype=dtype)
        for rows, sample in _attention_blocks(q, k, selected_SBK):
            block = _SelectedKeys(q, k, v, selected_SBK, rows, sample, value_dim)
            scores_RGMK = block.scores(scale)
            block_lse = scores_RGMK.logsumexp(-1, keepdim=True)
            block_out = (scores_RGMK - block_lse).exp() @ block.value_RGKE
            if sinks is not None:
                block_out, total = fold_in_sinks(
                    block_out.flatten(1, 2).unsqueeze(1), block_lse.flatten(1).unsqueeze(1), sinks
                )
                block_lse = total.squeeze(1).view_as(block_lse)
            out[rows, sample] = block_out.reshape(-1, *out.shape[2:]).to(out.dtype)
            lse[rows, sample] = block_lse.flatten(1)
            sums[rows, sample] = (scores_RGMK - block_lse).exp().sum((1, 2))
        ctx.save_for_backward(q, k, v, selected_SBK, sinks, out, lse)
        ctx.options = value_dim, scale
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, selected_SBK, sinks, out, lse = ctx.saved_tensors
        value_dim, scale = ctx.options
        dtype = lse.dtype
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k, dtype=dtype)
        dv = None if v is None else torch.zeros_like(v, dtype=dtype)
        for rows, sample in _attention_blocks(q, k, selected_SBK):
            block = _SelectedKeys(q, k, v, selected_SBK, rows, sample, value_dim)
            grad, result = (x[rows, sample].to(dtype).unflatten(1, (k.shape[2], -1)) for x in (grad_out, out))
            probs_RGMK = (block.scores(scale) - lse[rows, sample].unflatten(1, (k.shape[2], -1)).unsqueeze(-1)).exp()
            delta = (grad * result).sum(-1, keepdim=True)
            dscores_RGMK = probs_RGMK * (grad @ block.value_RGKE.mT - delta) * scale
            dq[rows, sample] = (dscores_RGMK @ block.key_RGKD).flatten(1, 2).to(dq.dtype)
            dkey_RGKD = dscores_RGMK.mT @ block.query_RGMD
            dvalue_RGKE = probs_RGMK.mT @ grad
            if dv is None:
                dkey_RGKD[..., :value_dim] += dvalue_RGKE
            else:
                block.add_rows(dv, dvalue_RGKE)
            block.add_rows(dk, dkey_RGKD)
        grads = dq, dk.to(k.dtype), None if dv is None else dv.to(k.dtype)
        return *grads, None, sink_gradient(grad_out, out, lse, sinks), None, None


class _SelectedKeys:
    """Queries of a block with copies of their selected keys and values, float32 at least."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        selected_SBK: Tensor,
        rows: slice,
        sample: int,
        value_dim: int,
    ) -> None:
        selected_RK = selected_SBK[rows, sample]
        self._sample = sample
        self._is_empty_RK = selected_RK < 0
        self._row = selected_RK.clamp(min=0).flatten()
        dtype = accumulation_dtype(q.dtype)
        self.query_RGMD = q[rows, sample].to(dtype).unflatten(1, (k.shape[2], -1))
        self.key_RGKD = self._gather(k).to(dtype)
        self.value_RGKE = self.key_RGKD[..., :value_dim] if v is None else self._gather(v).to(dtype)

    def scores(self, scale: float) -> Tensor:
        """Return the scores of the selected keys, [R, G, A/G, K], minus infinity in empty places."""
        scores = (self.query_RGMD * scale) @ self.key_RGKD.mT
        return scores.masked_fill_(self._is_empty_RK[:, None, None], -torch.inf)

    def add_rows(self, total: Tensor, part_RGKD: Tensor) -> None:
        """Add gradients of the copies to the gradients of their keys, [N, B, G, D]. Empty places have gradient 0."""
        total[:, self._sample].index_add_(0, self._row, part_RGKD.transpose(1, 2).flatten(0, 1))

    def _gather(self, x: Tensor) -> Tensor:
        copies = x[:, self._sample].index_select(0, self._row)
        return copies.unflatten(0, self._is_empty_RK.shape).transpose(1, 2)


def attention_sums(q: Tensor, k: Tensor, is_visible_BSN: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Return the probability of each key summed over the heads, [S, B, N], for dense attention, without a gradient.

    Args:
        q: queries of a block, [S, B, A, D].
        k: keys, [N, B, G, D].
        is_visible_BSN: keys that each query attends to.
        scale: factor of the scores.
        sinks: see `sparse_attention`.
    """
    dtype = accumulation_dtype(q.dtype)
    query_BGMSD = q.to(dtype).unflatten(2, (k.shape[2], -1)).permute(1, 2, 3, 0, 4) * scale
    key_BGND = k.to(dtype).permute(1, 2, 0, 3)
    scores = query_BGMSD @ key_BGND.unsqueeze(2).mT
    scores.masked_fill_(~is_visible_BSN[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).view(k.shape[2], -1, 1, 1))
    return (scores - lse).exp().sum((1, 2)).transpose(0, 1)


def selected_index_loss(index: IndexTensors, selected_SBK: Tensor, target_SBK: Tensor, weights_SB: Tensor) -> Tensor:
    """Compute the KL divergence of the indexer's softmax over the selected keys from a target: a weighted sum.

    Args:
        index: projections of the queries and of all keys.
        selected_SBK: keys of each query, int32, -1 in empty places.
        target_SBK: probability of each selected key. The probabilities of a query sum to 1.
        weights_SB: weight of each query.

    Returns:
        0-dim, in nats, float32 at least. Its gradient goes to the projections.
    """
    size = selected_SBK.shape[2] * max(index.query.shape[2:])

    def blocks() -> Iterator[_LossBlock]:
        for rows, sample in _blocks(index.query, size):
            selected_RK = selected_SBK[rows, sample]
            row = selected_RK.clamp(min=0).flatten()
            key_RKD = index.key[:, sample].index_select(0, row).unflatten(0, selected_RK.shape)
            limits = (selected_RK >= 0, target_SBK[rows, sample], weights_SB[rows, sample])
            yield _LossBlock(rows, sample, key_RKD, *limits, row)

    return _index_loss(index, blocks())


def visible_index_loss(index: IndexTensors, is_visible_BSN: Tensor, target_SBN: Tensor, weights_SB: Tensor) -> Tensor:
    """Compute `selected_index_loss` over all visible keys instead of the selected ones.

    Args:
        index: projections of a block of queries and of all keys.
        is_visible_BSN: keys that each query sees.
        target_SBN: probability of each key.
        weights_SB: weight of each query.
    """
    return _index_loss(
        index,
        (
            _LossBlock(
                slice(None),
                sample,
                index.key[:, sample],
                is_visible_BSN[sample],
                target_SBN[:, sample],
                weights_SB[:, sample],
            )
            for sample in range(index.query.shape[1])
        ),
    )


class _LossBlock(NamedTuple):
    """Queries of one sample, and the keys of each query or of all."""

    rows: slice
    sample: int
    keys: Tensor
    """[R, K, D] or [K, D]."""
    is_present_RK: Tensor
    target_RK: Tensor
    weights_R: Tensor
    key_rows: Tensor | None = None
    """Rows of the sample's keys, of all queries one after the other. None means `keys` are the keys of the sample."""


def _index_loss(index: IndexTensors, blocks: Iterable[_LossBlock]) -> Tensor:
    return _IndexLoss.apply(index.query, index.weight, index.key, blocks, torch.is_grad_enabled())


class _IndexLoss(torch.autograd.Function):
    """Sum of the divergences of blocks, for a scalar loss. It saves only the gradients of its forward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, weight: Tensor, key: Tensor, blocks: Iterable[_LossBlock], is_needed: bool
    ) -> Tensor:
        dtype = accumulation_dtype(query.dtype)
        total = torch.zeros((), dtype=dtype, device=query.device)
        grads = [torch.zeros_like(x, dtype=dtype) for x in (query, weight, key)] if is_needed else []
        for rows, sample, keys, is_present_RK, target_RK, weights_R, key_rows in blocks:
            keys = keys.to(dtype)
            query_RJD, weight_RJ = (x[rows, sample].to(dtype) for x in (query, weight))
            dots_RJK = query_RJD @ keys.mT
            scores_RK = (weight_RJ.unsqueeze(1) @ dots_RJK.relu()).squeeze(1)
            loss, dscores_RK = _divergence(scores_RK, is_present_RK, target_RK, weights_R)
            total += loss
            if is_needed:
                ddots_RJK = dscores_RK.unsqueeze(1) * weight_RJ.unsqueeze(2) * (dots_RJK > 0)
                grads[0][rows, sample] = ddots_RJK @ keys
                grads[1][rows, sample] = (dots_RJK.relu() @ dscores_RK.unsqueeze(2)).squeeze(2)
                if key_rows is None:
                    grads[2][:, sample] = ddots_RJK.flatten(0, 1).t() @ query_RJD.flatten(0, 1)
                else:
                    grads[2][:, sample].index_add_(0, key_rows, (ddots_RJK.mT @ query_RJD).flatten(0, 1))
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, (query, weight, key), strict=False)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad.to(x.dtype) * x for x in ctx.saved_tensors), None, None


def _divergence(scores: Tensor, is_present: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the KL divergences of the rows, and the gradient of the scores."""
    weights = weights.to(scores.dtype).unsqueeze(-1)
    log_probs = scores.masked_fill(~is_present, -torch.inf).log_softmax(-1)
    probs = log_probs.exp()
    target = target.to(scores.dtype)
    # A target of 0 contributes nothing, for any score.
    terms = torch.xlogy(target, target) - torch.where(target > 0, target * log_probs, 0.0)
    return (weights * terms).sum(), weights * (probs - target)


def block_rows(query: Tensor, elements_per_row: int) -> int:
    """Return the queries of a block whose largest temporary tensor has this many elements for each of them.

    Args:
        query: queries [S, ...] on their device.
        elements_per_row: elements for one query.
    """
    limit = MAX_BLOCK_ELEMENTS.get(query.device.type, MAX_BLOCK_ELEMENTS["cuda"])
    return max(1, min(len(query), limit // max(1, elements_per_row)))


def _blocks(query: Tensor, elements_per_row: int) -> Iterator[tuple[slice, int]]:
    """Yield the rows and the sample of each block of queries [S, B, ...]."""
    size = block_rows(query, elements_per_row)
    for sample in range(query.shape[1]):
        for start in range(0, len(query), size):
            yield slice(start, min(start + size, len(query))), sample


def _attention_blocks(q: Tensor, k: Tensor, selected_SBK: Tensor) -> Iterator[tuple[slice, int]]:
    return _blocks(q, selected_SBK.shape[2] * max(q.shape[2], k.shape[2:].numel()))
