"""Permutation of routed tokens by expert, and its inverse: local, no communication."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefold.ops.expert_ops import LazyCounts, Permutation
from moefold.ops.permute import TORCH_PERMUTE_OPS, PermuteOps, probs_per_row, values_per_choice


def as_counts(counts_E: Tensor, values: list[int] | None = None) -> Sequence[int]:
    """Return the tokens of each expert without a device sync.

    Args:
        counts_E: int64 [E].
    """
    if counts_E.device.type == "cpu":
        return counts_E.tolist() if values is None else values
    return LazyCounts(counts_E, values)


def plan_permutation(
    ids_TK: Tensor,
    num_experts: int,
    kept_TK: Tensor | None = None,
    padded_capacity: int | None = None,
    num_rows: int | None = None,
) -> Permutation:
    """Sort the routed tokens by expert. The sort is stable, so equal inputs give equal order on every rank.

    Args:
        ids_TK: chosen experts, [T, K], in [0, num_experts) wherever kept.
        kept_TK: mask of kept tokens, bool [T, K]. None means all.
        padded_capacity: rows of every expert, enough for its kept tokens, so that shapes do not depend on data. None
            means as many as it has tokens.
        num_rows: rows of a permutation with a mask and without padding, at least the number of kept tokens. The rows
            after the last expert's rows have dropped tokens. None means the number of kept tokens, which synchronises.
    """
    device = ids_TK.device
    (num_tokens, top_k) = ids_TK.shape
    ids_TK = ids_TK if kept_TK is None else torch.where(kept_TK, ids_TK, num_experts)
    # A radix sort takes a pass for each byte; narrower types do not sort fast.
    narrow = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int64
    sorted_ids, order = ids_TK.flatten().to(narrow).sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=device, dtype=sorted_ids.dtype))
    counts_E = bounds.diff()
    if padded_capacity is None:
        row = torch.zeros_like(order)
        if kept_TK is not None:
            order = order[: int(bounds[-1]) if num_rows is None else num_rows]
        row_TK = row.scatter_(0, order, torch.arange(len(order), device=device)).view_as(ids_TK)
        if num_rows is not None and kept_TK is not None:
            row_TK.masked_fill_(~kept_TK, 0)
        return Permutation(order // top_k, order, row_TK, counts_E, kept_TK, None)
    queue = torch.arange(num_tokens * top_k, device=device) - bounds[sorted_ids.long()]
    # Dropped tokens share one row after the last, which is sliced off.
    num_padded = num_experts * padded_capacity
    is_dropped = sorted_ids == num_experts
    target = (sorted_ids.long() * padded_capacity + queue).masked_fill_(is_dropped, num_padded)
    routed_index = torch.full((num_padded + 1,), -1, device=device).scatter_(0, target, order)[:num_padded]
    row = torch.empty_like(order).scatter_(0, order, target.masked_fill_(is_dropped, 0))
    non_padding = routed_index >= 0
    routed_index = routed_index.clamp(min=0)
    return Permutation(
        routed_index // top_k,
        routed_index,
        row.view_as(ids_TK),
        torch.full_like(counts_E, padded_capacity),
        kept_TK,
        non_padding,
    )


def truncate_permutation(permutation: Permutation, num_rows: int) -> Permutation:
    """Remove the rows from `num_rows` on, which have dropped tokens."""
    if len(permutation.token_R) == num_rows:
        return permutation
    return replace(
        permutation, token_R=permutation.token_R[:num_rows], topk_index_R=permutation.topk_index_R[:num_rows]
    )


def reorder_permutation(permutation: Permutation, order_R: Tensor) -> Permutation:
    """Reorder the rows of a permutation: row i becomes the former row order_R[i].

    Args:
        permutation: a permutation without padding.
        order_R: each row of a kept token once, int64 [R].
    """
    assert permutation.non_padding_R is None, "padded rows cannot be reordered"
    if len(order_R) == 0:
        return permutation
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return replace(
        permutation,
        token_R=permutation.token_R[order_R],
        topk_index_R=permutation.topk_index_R[order_R],
        row_TK=inverse_R[permutation.row_TK],
    )


def permute(
    x_TH: Tensor, permutation: Permutation, ops: PermuteOps = TORCH_PERMUTE_OPS, rows_RH: Tensor | None = None
) -> Tensor:
    """Copy each token into the rows of its experts: [T, H] -> [R, H], with zeros in padding rows.

    Args:
        rows_RH: the result, where `ops.permute` has computed it already. None means compute it.
    """
    return _Permute.apply(x_TH, rows_RH, permutation, ops)


def permute_probs(probs_TK: Tensor, permutation: Permutation) -> Tensor:
    """Gather the routing probability of each row, [R], 0 in padding rows, differentiable."""
    return _PermuteProbs.apply(probs_TK, permutation)


def unpermute(
    y_RH: Tensor, permutation: Permutation, probs_TK: Tensor | None, ops: PermuteOps = TORCH_PERMUTE_OPS
) -> Tensor:
    """Compute the weighted sum of each token's rows: [R, H] -> [T, H]. Dropped tokens count as zero.

    Args:
        y_RH: expert outputs. Padding rows are not read.
        probs_TK: routing probabilities, [T, K]. The sum is computed in their dtype and returned in the dtype of y_RH.
            None if the rows are weighted already, and are not saved for backward.
    """
    return _Unpermute.apply(y_RH, probs_TK, permutation, ops)


def reorder(x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Gather rows: row i of the result is row order_R[i]. `inverse_R` is the inverse, used in the backward pass."""
    return _Reorder.apply(x_RH, order_R, inverse_R)


def order_by_expert(counts_GE: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Compute the order that sorts rows from G sources, each sorted by expert, by expert over all sources.

    Args:
        counts_GE: rows of each expert from each source, int64 [G, E]. Their device computes, without a sync.

    Returns:
        (order_R, inverse_R) for `reorder`. Rows of one expert stay in the order of their sources.
    """
    starts_GE = (counts_GE.flatten().cumsum(0) - counts_GE.flatten()).view_as(counts_GE)
    rows = counts_GE.t().flatten()
    starts = starts_GE.t().flatten()
    shift = starts - (rows.cumsum(0) - rows)
    index = torch.arange(num_rows, device=rows.device)
    order = index + shift.repeat_interleave(rows, output_size=num_rows)
    return order, torch.empty_like(order).scatter_(0, order, index)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, rows_RH: Tensor | None, permutation: Permutation, ops: PermuteOps) -> Tensor:
        ctx.permutation = permutation
        ctx.ops = ops
        return ops.permute(x_TH, permutation) if rows_RH is None else rows_RH.view_as(rows_RH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ops.combine(grad_RH, ctx.permutation, None), None, None, None


class _PermuteProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return probs_per_row(probs_TK, permutation)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return values_per_choice(grad_R, ctx.permutation), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, probs_TK: Tensor | None, permutation: Permutation, ops: PermuteOps) -> Tensor:
        ctx.permutation = permutation
        ctx.ops = ops
        ctx.is_weighted = probs_TK is not None
        if probs_TK is not None:
            ctx.save_for_backward(y_RH, probs_TK)
        return ops.combine(y_RH, permutation, probs_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ops: PermuteOps = ctx.ops
        if not ctx.is_weighted:
            return ops.permute(grad_TH, ctx.permutation), None, None, None
        y_RH, probs_TK = ctx.saved_tensors
        return *ops.combine_backward(grad_TH, y_RH, ctx.permutation, probs_TK), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R
        return x_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        return grad_RH.index_select(0, ctx.inverse_R), None, None
