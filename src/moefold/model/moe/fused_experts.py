"""Experts over rows that they sort as they read them, and whose results they add up for each token as they leave."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.model.delayed_wgrad import WeightGradStoreProtocol, should_delay
from moefold.model.moe.expert_weights import ExpertWeights
from moefold.ops.interface import ExpertOps, GatheredRows, PermuteMap, scale_rows
from moefold.ops.swiglu import ExpertActivation


@dataclass(frozen=True)
class FusedExpertOptions:
    """What the experts have to know beside tensors."""

    kernels: ExpertOps
    offsets_E: Tensor
    """Where the rows of each expert end, int32 [E] on the device."""
    activation: ExpertActivation
    bias_slice: slice
    permute_map: PermuteMap | None = None
    """None: rows come sorted and leave so."""
    saves_fc1: bool = True
    """Whether the inner projections are kept for the backward pass, or made again there."""
    wgrad_store: WeightGradStoreProtocol | None = None
    """Takes the gradients of the weights."""
    tracked_weights: tuple[Tensor, ...] = ()
    """The differentiable weights, if `wgrad_store` is there: autograd is given detached ones."""

    @property
    def token_index(self) -> Tensor | None:
        """Token of each row, where rows do not come sorted."""
        return None if self.permute_map is None else self.permute_map.source_R


def fused_experts(
    x: Tensor, weights: ExpertWeights, options: FusedExpertOptions, probs_R: Tensor | None = None
) -> Tensor:
    """All experts over all rows; local, and waits for nothing that its kernels do not wait for.

    Args:
        x: rows sorted by expert [R, H], or with a sorting the tokens [T, H].
        weights: of the experts.
        options: kernels, row counts and gate.
        probs_R: factor of each row's result, [R].

    Returns:
        Like `x`: a result for each row, or their sum for each token.
    """
    tensors = [getattr(weights, part.name) for part in fields(weights)]
    if should_delay(options.wgrad_store, x, weights.gate_EHF):
        options = replace(options, tracked_weights=tuple(w for w in tensors if w is not None))
        tensors = [None if w is None else w.detach() for w in tensors]
    else:
        options = replace(options, wgrad_store=None)
    y: Tensor = _FusedExperts.apply(x, options, probs_R, *tensors)
    return y


class _FusedExperts(torch.autograd.Function):
    """Keeps x as it came and, if asked, the two inner projections."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: FusedExpertOptions, probs_R: Tensor | None, *tensors: Any) -> Tensor:
        w = ExpertWeights(*tensors)
        g, u = _fc1(x, w, options)
        hidden = options.kernels.activation(options.activation, g, u, probs_R)
        ctx.save_for_backward(x, probs_R, *tensors, *((g, u) if options.saves_fc1 else ()))
        ctx.options = options
        if options.permute_map is not None and w.down_bias_EH is None:
            return options.kernels.grouped_gemm_combine(
                GatheredRows(hidden), w.down_EFH, options.offsets_E, options.permute_map
            )
        y_RH = options.kernels.grouped_gemm(GatheredRows(hidden), w.down_EFH, options.offsets_E)
        if w.down_bias_EH is not None:
            bias_RH = _expand_to_rows(w.down_bias_EH, options.offsets_E, len(y_RH))
            y_RH[:, options.bias_slice] += bias_RH if probs_R is None else scale_rows(bias_RH, probs_R)
        return y_RH if options.permute_map is None else options.kernels.combine(y_RH, options.permute_map)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights_R, *tensors = ctx.saved_tensors
        num_weights = len(fields(ExpertWeights))
        tensors, inner = tensors[:num_weights], tensors[num_weights:]
        how = ctx.options
        w = ExpertWeights(*tensors)
        kernels = how.kernels
        offsets_E = how.offsets_E
        source_R = how.source
        g, u = inner if how.saves_fc1 else _fc1(x, w, how)
        grad_rows = GatheredRows(grad.contiguous(), source_R)
        grad_hidden = kernels.grouped_gemm(grad_rows, w.down_EFH.transpose(1, 2), offsets_E)
        hidden, grad_g, grad_u, grad_weights_R = kernels.activation_backward(how.gate, grad_hidden, g, u, weights_R)
        if grad_weights_R is not None and w.down_bias_EH is not None:
            bias_RH = _expand_to_rows(w.down_bias_EH, offsets_E, grad_rows.num_rows).to(grad_weights_R.dtype)
            columns = grad_rows.materialize()[:, how.bias_slice].to(grad_weights_R.dtype)
            grad_weights_R += torch.linalg.vecdot(columns, bias_RH)
        back = w.gate_EHF.transpose(1, 2)
        second = (grad_u, w.up_EHF.transpose(1, 2))
        if how.permute_map is None:
            grad_x = kernels.grouped_gemm(GatheredRows(grad_g), back, offsets_E, second)
        else:
            grad_x = kernels.grouped_gemm_combine(GatheredRows(grad_g), back, offsets_E, how.permute_map, second)
        x_rows = GatheredRows(x, source_R)

        def of_weights() -> list[Tensor | None]:
            found: list[Tensor | None] = [
                kernels.weight_gradient(x_rows, GatheredRows(grad_g), offsets_E),
                kernels.weight_gradient(x_rows, GatheredRows(grad_u), offsets_E),
                kernels.weight_gradient(GatheredRows(hidden), grad_rows, offsets_E),
            ]
            if w.gate_bias_EF is None:
                return [*found, None, None, None]
            grad_y = grad_rows.materialize()[:, how.bias_slice]
            grad_y = grad_y if weights_R is None else scale_rows(grad_y, weights_R)
            return [*found, *(_sum_per_expert(rows, offsets_E) for rows in (grad_g, grad_u, grad_y))]

        if how.wgrad_store is None:
            return grad_x, None, grad_weights_R, *of_weights()
        how.wgrad_store.put(how.held, lambda: [grad for grad in of_weights() if grad is not None])
        return grad_x, None, grad_weights_R, *[None] * num_weights


def _fc1(x: Tensor, w: ExpertWeights, options: FusedExpertOptions) -> tuple[Tensor, Tensor]:
    """The two inner projections of every row."""
    rows = GatheredRows(x, options.token_index)
    g, u = (options.kernels.grouped_gemm(rows, matrix, options.offsets_E) for matrix in (w.gate_EHF, w.up_EHF))
    if w.gate_bias_EF is not None and w.up_bias_EF is not None:
        g += _expand_to_rows(w.gate_bias_EF, options.offsets_E, len(g))
        u += _expand_to_rows(w.up_bias_EF, options.offsets_E, len(u))
    return g, u


def _expand_to_rows(values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """What belongs to the expert of each row, [R, N]."""
    row_R = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    return values_EN.index_select(0, torch.searchsorted(offsets_E, row_R, right=True))


def _sum_per_expert(values_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """The sum over the rows of each expert, [E, N]: a product, whose sum has a fixed order."""
    row_R = torch.arange(len(values_RN), device=offsets_E.device)
    starts_E = torch.cat((offsets_E.new_zeros(1), offsets_E[:-1]))
    is_mine_ER = (row_R >= starts_E.unsqueeze(1)) & (row_R < offsets_E.unsqueeze(1))
    return is_mine_ER.to(values_RN.dtype) @ values_RN
