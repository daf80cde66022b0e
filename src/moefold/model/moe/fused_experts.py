"""Fused experts: kernels that permute tokens while reading and combine expert outputs while writing."""

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
    """Non-tensor arguments of `fused_experts`."""

    kernels: ExpertOps
    offsets_E: Tensor
    """End offset of each expert's rows, int32 [E] on the device."""
    activation: ExpertActivation
    bias_slice: slice
    permute_map: PermuteMap | None = None
    """None: rows are sorted by expert already, in input and output."""
    saves_fc1: bool = True
    """True: save the gate and up projections for backward; False: recompute them."""
    wgrad_store: WeightGradStoreProtocol | None = None
    """Receives delayed weight gradients."""
    tracked_weights: tuple[Tensor, ...] = ()
    """Differentiable weights, where autograd gets detached ones because of `wgrad_store`."""

    @property
    def token_index(self) -> Tensor | None:
        """Token index of each row; None where rows are sorted already."""
        return None if self.permute_map is None else self.permute_map.source_R


def fused_experts(
    x: Tensor, weights: ExpertWeights, options: FusedExpertOptions, probs_R: Tensor | None = None
) -> Tensor:
    """Apply all experts with fused kernels; local, and without device syncs but those of the kernels.

    Args:
        x: tokens sorted by expert [R, H], or with a permute_map the unsorted tokens [T, H].
        weights: of the experts.
        options: kernels, offsets and activation.
        probs_R: factor of each output row, [R].

    Returns:
        Like `x`: an output for each row, or the sum for each token.
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
    """Fused experts; saves x unsorted and, if asked, gate and up projections."""

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
        x, probs_R, *tensors = ctx.saved_tensors
        num_weights = len(fields(ExpertWeights))
        tensors, fc1_outputs = tensors[:num_weights], tensors[num_weights:]
        options = ctx.options
        w = ExpertWeights(*tensors)
        kernels = options.kernels
        offsets_E = options.offsets_E
        source_R = options.token_index
        g, u = fc1_outputs if options.saves_fc1 else _fc1(x, w, options)
        grad_rows = GatheredRows(grad.contiguous(), source_R)
        grad_hidden = kernels.grouped_gemm(grad_rows, w.down_EFH.transpose(1, 2), offsets_E)
        hidden, grad_g, grad_u, grad_probs_R = kernels.activation_backward(
            options.activation, grad_hidden, g, u, probs_R
        )
        if grad_probs_R is not None and w.down_bias_EH is not None:
            bias_RH = _expand_to_rows(w.down_bias_EH, offsets_E, grad_rows.num_rows).to(grad_probs_R.dtype)
            columns = grad_rows.materialize()[:, options.bias_slice].to(grad_probs_R.dtype)
            grad_probs_R += torch.linalg.vecdot(columns, bias_RH)
        gate_t = w.gate_EHF.transpose(1, 2)
        up_term = (grad_u, w.up_EHF.transpose(1, 2))
        if options.permute_map is None:
            grad_x = kernels.grouped_gemm(GatheredRows(grad_g), gate_t, offsets_E, up_term)
        else:
            grad_x = kernels.grouped_gemm_combine(GatheredRows(grad_g), gate_t, offsets_E, options.permute_map, up_term)
        x_rows = GatheredRows(x, source_R)

        def weight_gradients() -> list[Tensor | None]:
            gradients: list[Tensor | None] = [
                kernels.weight_gradient(x_rows, GatheredRows(grad_g), offsets_E),
                kernels.weight_gradient(x_rows, GatheredRows(grad_u), offsets_E),
                kernels.weight_gradient(GatheredRows(hidden), grad_rows, offsets_E),
            ]
            if w.gate_bias_EF is None:
                return [*gradients, None, None, None]
            grad_y = grad_rows.materialize()[:, options.bias_slice]
            grad_y = grad_y if probs_R is None else scale_rows(grad_y, probs_R)
            return [*gradients, *(_sum_per_expert(rows, offsets_E) for rows in (grad_g, grad_u, grad_y))]

        if options.wgrad_store is None:
            return grad_x, None, grad_probs_R, *weight_gradients()
        options.wgrad_store.put(
            options.tracked_weights, lambda: [grad for grad in weight_gradients() if grad is not None]
        )
        return grad_x, None, grad_probs_R, *[None] * num_weights


def _fc1(x: Tensor, w: ExpertWeights, options: FusedExpertOptions) -> tuple[Tensor, Tensor]:
    """Compute gate and up projections of every row."""
    rows = GatheredRows(x, options.token_index)
    g, u = (options.kernels.grouped_gemm(rows, matrix, options.offsets_E) for matrix in (w.gate_EHF, w.up_EHF))
    if w.gate_bias_EF is not None and w.up_bias_EF is not None:
        g += _expand_to_rows(w.gate_bias_EF, options.offsets_E, len(g))
        u += _expand_to_rows(w.up_bias_EF, options.offsets_E, len(u))
    return g, u


def _expand_to_rows(values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """Gather the value of each row's expert, [R, N]."""
    row_R = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    return values_EN.index_select(0, torch.searchsorted(offsets_E, row_R, right=True))


def _sum_per_expert(values_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum the rows of each expert, [E, N]; as a GEMM, so that the order of the sum is deterministic."""
    row_R = torch.arange(len(values_RN), device=offsets_E.device)
    starts_E = torch.cat((offsets_E.new_zeros(1), offsets_E[:-1]))
    one_hot_ER = (row_R >= starts_E.unsqueeze(1)) & (row_R < offsets_E.unsqueeze(1))
    return one_hot_ER.to(values_RN.dtype) @ values_RN
