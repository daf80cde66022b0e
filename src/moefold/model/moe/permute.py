"""Permutation of routed tokens by expert, and its inverse: local, no communication."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.interface import LazyCounts, Permutation


def as_counts(counts_E: Tensor) -> Sequence[int]:
    """Return the tokens of each expert without a device sync."""
    return counts_E.tolist() if counts_E.device.type == "cpu" else LazyCounts(counts_E)


def plan_permutation(
    ids_TK: Tensor, num_experts: int, kept_TK: Tensor | None = None, padded_capacity: int | None = None
) -> Permutation:
    """Sort the routed tokens by expert. The sort is stable, so equal inputs give equal order on every rank.

    Args:
        ids_TK: chosen experts, [T, K], int64 in [0, num_experts) wherever kept.
        num_experts: E.
        kept_TK: mask of kept tokens, bool [T, K]; None: all.
        padded_capacity: rows of every expert, enough for its kept tokens, so that shapes do not depend on data; None:
            as many as it has tokens.
    """
    device = ids_TK.device
    (num_tokens, top_k) = ids_TK.shape
    ids = ids_TK.flatten() if kept_TK is None else ids_TK.masked_fill(~kept_TK, num_experts).flatten()
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=device))
    counts_E = bounds.diff()
    row = torch.zeros_like(ids)
    if padded_capacity is None:
        if kept_TK is not None:
            order = order[: int(bounds[-1])]
        row.scatter_(0, order, torch.arange(len(order), device=device))
        return Permutation(order // top_k, order, row.view_as(ids_TK), counts_E, kept_TK, None)
    queue = torch.arange(num_tokens * top_k, device=device) - bounds[sorted_ids]
    # Dropped tokens share one row after the last, which is sliced off.
    num_rows = num_experts * padded_capacity
    target = (sorted_ids * padded_capacity + queue).masked_fill_(sorted_ids == num_experts, num_rows)
    routed_index = torch.full((num_rows + 1,), -1, device=device).scatter_(0, target, order)[:num_rows]
    row.scatter_(0, order, target.masked_fill(target == num_rows, 0))
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


def reorder_permutation(permutation: Permutation, order_R: Tensor) -> Permutation:
    """Reorder the rows of a permutation: row i becomes the former row order_R[i].

    Args:
        permutation: one without padding.
        order_R: each row once, int64 [R].
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


def permute(x_TH: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token into the rows of its experts: [T, H] -> [R, H], with zeros in padding rows."""
    return _Permute.apply(x_TH, permutation)


def permute_no_grad(x_TH: Tensor, permutation: Permutation) -> Tensor:
    """Permute like `permute`, for any dtype, bytes included, without a gradient."""
    x_RH = x_TH.index_select(0, permutation.token_R)
    if permutation.non_padding_R is not None:
        x_RH.masked_fill_(~permutation.non_padding_R.unsqueeze(1), 0)
    return x_RH


def unpermute_no_grad(grad_RH: Tensor, permutation: Permutation) -> Tensor:
    """Apply the adjoint of `permute`: [R, H] -> [T, H]."""
    return _weighted_sum(grad_RH, permutation, permutation.kept_TK)


def permute_probs(probs_TK: Tensor, permutation: Permutation) -> Tensor:
    """Gather the routing probability of each row, [R], 0 in padding rows; differentiable."""
    return _PermuteProbs.apply(probs_TK, permutation)


def unpermute(y_RH: Tensor, permutation: Permutation, probs_TK: Tensor | None) -> Tensor:
    """Compute the weighted sum of each token's rows: [R, H] -> [T, H]; dropped tokens count as zero.

    Args:
        y_RH: expert outputs; padding rows are not read.
        permutation: the one that made the rows.
        probs_TK: routing probabilities, [T, K]; the sum is computed in their dtype and returned in that of y_RH. None:
            the rows are weighted already, and are not saved for backward.
    """
    return _Unpermute.apply(y_RH, probs_TK, permutation)


def reorder(x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Gather rows: row i of the result is row order_R[i]; `inverse_R` is the inverse, used in the backward pass."""
    return _Reorder.apply(x_RH, order_R, inverse_R)


def order_by_expert(counts_GE: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the order that sorts rows from G sources, each sorted by expert, by expert over all sources.

    Args:
        counts_GE: rows of each expert from each source, int64 [G, E].

    Returns:
        (order_R, inverse_R) for `reorder`; rows of one expert stay in the order of their sources.
    """
    total = int(counts_GE.sum())
    starts_GE = (counts_GE.flatten().cumsum(0) - counts_GE.flatten()).view_as(counts_GE)
    rows = counts_GE.t().flatten()
    starts = starts_GE.t().flatten()
    shift = starts - (rows.cumsum(0) - rows)
    index = torch.arange(total, device=rows.device)
    order = index + shift.repeat_interleave(rows, output_size=total)
    return order, torch.empty_like(order).scatter_(0, order, index)


def _weighted_sum(y_RH: Tensor, permutation: Permutation, probs_TK: Tensor | None) -> Tensor:
    """Sum probs_TK * y_RH[row_TK] over k, in float32 at least; None: every weight is 1."""
    if y_RH.shape[0] == 0:
        return y_RH.new_zeros(permutation.row_TK.shape[0], y_RH.shape[1])
    dtype = torch.promote_types(y_RH.dtype, torch.float32)
    probs_TK = None if probs_TK is None else probs_TK.to(dtype).contiguous()
    # Gathers, scales and sums in one pass: on CPU 2 to 20 times faster than separate steps (T=2048, K=2, H=256).
    y_TH = F.embedding_bag(permutation.row_TK, y_RH.to(dtype), mode="sum", per_sample_weights=probs_TK)
    return y_TH.to(y_RH.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return permute_no_grad(x_TH, permutation)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
        return unpermute_no_grad(grad_RH, ctx.permutation), None


class _PermuteProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return _gather_probs(probs_TK, permutation)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return _unpermute_values(grad_R, ctx.permutation), None


def _gather_probs(probs_TK: Tensor, permutation: Permutation) -> Tensor:
    probs_R = probs_TK.flatten().index_select(0, permutation.topk_index_R)
    if permutation.non_padding_R is not None:
        probs_R.masked_fill_(~permutation.non_padding_R, 0.0)
    return probs_R


def _unpermute_values(values_R: Tensor, permutation: Permutation) -> Tensor:
    """Gather the value of each routed token's row, [T, K]; 0 for dropped ones."""
    if len(values_R) == 0:
        return values_R.new_zeros(permutation.row_TK.shape)
    values_TK = values_R[permutation.row_TK]
    if permutation.kept_TK is not None:
        values_TK.masked_fill_(~permutation.kept_TK, 0.0)
    return values_TK


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, probs_TK: Tensor | None, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        ctx.is_weighted = probs_TK is not None
        if probs_TK is None:
            return unpermute_no_grad(y_RH, permutation)
        ctx.save_for_backward(y_RH, probs_TK)
        if permutation.kept_TK is not None:
            probs_TK = probs_TK * permutation.kept_TK
        return _weighted_sum(y_RH, permutation, probs_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor | None, None]:
        permutation: Permutation = ctx.permutation
        if not ctx.is_weighted:
            return permute_no_grad(grad_TH, permutation), None, None
        y_RH, probs_TK = ctx.saved_tensors
        if y_RH.shape[0] == 0:
            return torch.zeros_like(y_RH), torch.zeros_like(probs_TK), None
        grad_RH = grad_TH.to(probs_TK.dtype).index_select(0, permutation.token_R)
        dot_R = torch.linalg.vecdot(grad_RH, y_RH.to(probs_TK.dtype))
        grad_TK = _unpermute_values(dot_R, permutation)
        probs_R = _gather_probs(probs_TK, permutation)
        return grad_RH.mul_(probs_R.unsqueeze(1)).to(y_RH.dtype), grad_TK, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R
        return x_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        return grad_RH.index_select(0, ctx.inverse_R), None, None
