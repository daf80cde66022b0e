"""Experts over rows that they sort as they read them, and whose results they add up for each token as they leave."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.kernels.rows import RowKernels, Rows, Sorting, scaled
from moefold.model.later import Later, can_wait
from moefold.moe.expert_weights import ExpertWeights
from moefold.moe.gate import Gate


@dataclass(frozen=True)
class SortedHow:
    """What the experts have to know beside tensors."""

    kernels: RowKernels
    offsets_E: Tensor
    """Where the rows of each expert end, int32 [E] on the device."""
    gate: Gate
    bias_columns: slice
    sorting: Sorting | None = None
    """None: rows come sorted and leave so."""
    keeps_inner: bool = True
    """Whether the inner projections are kept for the backward pass, or made again there."""
    later: Later | None = None
    """Takes the gradients of the weights."""
    held: tuple[Tensor, ...] = ()
    """The differentiable weights, if `later` is there: autograd is given detached ones."""

    @property
    def source(self) -> Tensor | None:
        """Token of each row, where rows do not come sorted."""
        return None if self.sorting is None else self.sorting.source_R


def sorted_experts(x: Tensor, weights: ExpertWeights, how: SortedHow, weights_R: Tensor | None = None) -> Tensor:
    """All experts over all rows; local, and waits for nothing that its kernels do not wait for.

    Args:
        x: rows sorted by expert [R, H], or with a sorting the tokens [T, H].
        weights: of the experts.
        how: kernels, row counts and gate.
        weights_R: factor of each row's result, [R].

    Returns:
        Like `x`: a result for each row, or their sum for each token.
    """
    tensors = [getattr(weights, part.name) for part in fields(weights)]
    if can_wait(how.later, x, weights.gate_EHF):
        how = replace(how, held=tuple(w for w in tensors if w is not None))
        tensors = [None if w is None else w.detach() for w in tensors]
    else:
        how = replace(how, later=None)
    y: Tensor = _SortedExperts.apply(x, how, weights_R, *tensors)
    return y


class _SortedExperts(torch.autograd.Function):
    """Keeps x as it came and, if asked, the two inner projections."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: SortedHow, weights_R: Tensor | None, *tensors: Any) -> Tensor:
        w = ExpertWeights(*tensors)
        g, u = _inner(x, w, how)
        hidden = how.kernels.gate(how.gate, g, u, weights_R)
        ctx.save_for_backward(x, weights_R, *tensors, *((g, u) if how.keeps_inner else ()))
        ctx.how = how
        if how.sorting is not None and w.down_bias_EH is None:
            return how.kernels.product_combined(Rows(hidden), w.down_EFH, how.offsets_E, how.sorting)
        y_RH = how.kernels.product(Rows(hidden), w.down_EFH, how.offsets_E)
        if w.down_bias_EH is not None:
            bias_RH = _of_each_row(w.down_bias_EH, how.offsets_E, len(y_RH))
            y_RH[:, how.bias_columns] += bias_RH if weights_R is None else scaled(bias_RH, weights_R)
        return y_RH if how.sorting is None else how.kernels.combine(y_RH, how.sorting)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights_R, *tensors = ctx.saved_tensors
        num_weights = len(fields(ExpertWeights))
        tensors, inner = tensors[:num_weights], tensors[num_weights:]
        how, w = ctx.how, ExpertWeights(*tensors)
        kernels, offsets_E, source_R = how.kernels, how.offsets_E, how.source
        g, u = inner if how.keeps_inner else _inner(x, w, how)
        grad_rows = Rows(grad.contiguous(), source_R)
        grad_hidden = kernels.product(grad_rows, w.down_EFH.transpose(1, 2), offsets_E)
        hidden, grad_g, grad_u, grad_weights_R = kernels.gate_backward(how.gate, grad_hidden, g, u, weights_R)
        if grad_weights_R is not None and w.down_bias_EH is not None:
            bias_RH = _of_each_row(w.down_bias_EH, offsets_E, grad_rows.count).to(grad_weights_R.dtype)
            columns = grad_rows.gathered()[:, how.bias_columns].to(grad_weights_R.dtype)
            grad_weights_R += torch.linalg.vecdot(columns, bias_RH)
        back, second = w.gate_EHF.transpose(1, 2), (grad_u, w.up_EHF.transpose(1, 2))
        if how.sorting is None:
            grad_x = kernels.product(Rows(grad_g), back, offsets_E, second)
        else:
            grad_x = kernels.product_combined(Rows(grad_g), back, offsets_E, how.sorting, second)
        x_rows = Rows(x, source_R)

        def of_weights() -> list[Tensor | None]:
            found: list[Tensor | None] = [
                kernels.weight_gradient(x_rows, Rows(grad_g), offsets_E),
                kernels.weight_gradient(x_rows, Rows(grad_u), offsets_E),
                kernels.weight_gradient(Rows(hidden), grad_rows, offsets_E),
            ]
            if w.gate_bias_EF is None:
                return [*found, None, None, None]
            grad_y = grad_rows.gathered()[:, how.bias_columns]
            grad_y = grad_y if weights_R is None else scaled(grad_y, weights_R)
            return [*found, *(_sum_of_each(rows, offsets_E) for rows in (grad_g, grad_u, grad_y))]

        if how.later is None:
            return grad_x, None, grad_weights_R, *of_weights()
        how.later.postpone(how.held, lambda: [grad for grad in of_weights() if grad is not None])
        return grad_x, None, grad_weights_R, *[None] * num_weights


def _inner(x: Tensor, w: ExpertWeights, how: SortedHow) -> tuple[Tensor, Tensor]:
    """The two inner projections of every row."""
    rows = Rows(x, how.source)
    g, u = (how.kernels.product(rows, matrix, how.offsets_E) for matrix in (w.gate_EHF, w.up_EHF))
    if w.gate_bias_EF is not None and w.up_bias_EF is not None:
        g += _of_each_row(w.gate_bias_EF, how.offsets_E, len(g))
        u += _of_each_row(w.up_bias_EF, how.offsets_E, len(u))
    return g, u


def _of_each_row(values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """What belongs to the expert of each row, [R, N]."""
    row_R = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    return values_EN.index_select(0, torch.searchsorted(offsets_E, row_R, right=True))


def _sum_of_each(values_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """The sum over the rows of each expert, [E, N]: a product, whose sum has a fixed order."""
    row_R = torch.arange(len(values_RN), device=offsets_E.device)
    starts_E = torch.cat((offsets_E.new_zeros(1), offsets_E[:-1]))
    is_mine_ER = (row_R >= starts_E.unsqueeze(1)) & (row_R < offsets_E.unsqueeze(1))
    return is_mine_ER.to(values_RN.dtype) @ values_RN
