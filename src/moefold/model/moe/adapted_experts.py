"""Experts with low-rank adapters (arXiv:2106.09685): one autograd function, whose products are grouped GEMMs.

Each matrix W_e of expert e has a pair A_e, B_e: x W_e + scale (x A_e) B_e for the rows x of the expert. The matrices
and the biases are frozen: their gradients are not computed. Their outputs and the products x A_e are not saved. Under
expert tensor parallelism the A of gate and up and the B of down are whole on each etp rank. Their gradients are partial
sums over etp, as each rank computes its own F/etp columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.expert_ops import ExpertOptions, ExpertWeights, GatheredRows, scale_rows
from moefold.ops.gemm import TORCH_GEMM, Gemm
from moefold.ops.grouped_experts import (
    GroupedExpertOps,
    expand_to_rows,
    gemm_per_expert,
    row_offsets,
    weight_gradient_per_expert,
)
from moefold.ops.torch_experts import GroupedMMExpertOps, supports_grouped_mm

NO_ADAPTER = (None, None)
Pair = tuple[Tensor | None, Tensor | None]
Pairs = Sequence[Tensor | None]
"""Adapters A, B of one matrix, or of gate, up and down."""


@dataclass(frozen=True)
class ExpertAdapters:
    """Local adapters of a set of experts, in the compute dtype: (A [E, in, r], B [E, r, out]), or two None."""

    gate: Pair = NO_ADAPTER
    up: Pair = NO_ADAPTER
    down: Pair = NO_ADAPTER
    scale: float = 1.0


def adapted_experts(
    x_RH: Tensor,
    weights: ExpertWeights,
    adapters: ExpertAdapters,
    options: ExpertOptions,
    probs_R: Tensor | None = None,
    gemm: Gemm = TORCH_GEMM,
) -> Tensor:
    """Compute frozen experts with their adapters. It does not communicate.

    Args:
        weights: weights of the experts, in the dtype of x, without a gradient.
        options: row counts, activation and saved tensors, without a `permute_map`.
        probs_R: factor of each output row.
        gemm: GEMM backend where the device has no grouped GEMM.

    Returns:
        [R, H], under etp a partial sum over F.
    """
    assert options.permute_map is None, "the operations of experts with adapters fuse no permutation"
    pairs = (*adapters.gate, *adapters.up, *adapters.down)
    widths = {size for adapter in pairs if adapter is not None for size in adapter.shape[1:]}
    widths |= {*weights.gate_EHF.shape[1:], *weights.down_EFH.shape[1:]}
    ops = GroupedMMExpertOps() if supports_grouped_mm(x_RH, len(x_RH), *widths) else _GemmExpertOps(gemm)
    products = _Products(ops, row_offsets(options.tokens_per_expert, x_RH.device), adapters.scale)
    return _AdaptedExperts.apply(x_RH, probs_R, weights, options, products, *pairs)


@dataclass(frozen=True)
class _GemmExpertOps(GroupedExpertOps):
    """Grouped products as one GEMM after another."""

    gemm: Gemm

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class."""
        assert second is None
        return gemm_per_expert(self._product, rows, w_EKN, offsets_E)

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class."""
        return weight_gradient_per_expert(self._weight_gradient, rows, grad, offsets_E)

    def _product(self, x_MK: Tensor, w_KN: Tensor) -> Tensor:
        # oneDNN multiplies no empty tensors.
        return self.gemm.matmul(x_MK, w_KN.t()) if len(x_MK) else x_MK.new_zeros(0, w_KN.shape[1])

    def _weight_gradient(self, xt_KM: Tensor, grad_MN: Tensor) -> Tensor:
        if not len(grad_MN):
            return grad_MN.new_zeros(len(xt_KM), grad_MN.shape[1])
        return self.gemm.weight_gradient(xt_KM.t(), grad_MN)


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        probs_R: Tensor | None,
        weights: ExpertWeights,
        options: ExpertOptions,
        products: "_Products",
        *pairs: Tensor | None,
    ) -> Tensor:
        rows = GatheredRows(x_RH)
        g_RF, u_RF = products.fc1(rows, weights, pairs)
        hidden_RF = products.ops.activation(options.activation, g_RF, u_RF, probs_R)
        y_RH = products.apply(GatheredRows(hidden_RF), weights.down_EFH, pairs[4:])
        if weights.down_bias_EH is not None:
            bias_RH = expand_to_rows(weights.down_bias_EH, products.offsets_E, len(y_RH))
            y_RH[:, options.bias_slice] += bias_RH if probs_R is None else scale_rows(bias_RH, probs_R)
        saved = (g_RF, u_RF) if options.saves_fc1 else ()
        ctx.save_for_backward(x_RH, probs_R, *pairs, *saved)
        ctx.args = weights, options, products
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor | None, ...]:
        x_RH, probs_R, *saved = ctx.saved_tensors
        weights, options, products = ctx.args
        pairs = saved[:6]
        rows = GatheredRows(x_RH)
        g_RF, u_RF = saved[6:] if options.saves_fc1 else products.fc1(rows, weights, pairs)
        grad_rows = GatheredRows(grad_RH.contiguous())
        grad_hidden, low_rank_y = products.input_gradient(grad_rows, weights.down_EFH, pairs[4:])
        hidden_RF, grad_g, grad_u, grad_probs_R = products.ops.activation_backward(
            options.activation, grad_hidden, g_RF, u_RF, probs_R
        )
        if grad_probs_R is not None and weights.down_bias_EH is not None:
            columns = grad_rows.values[:, options.bias_slice].to(grad_probs_R.dtype)
            bias_RH = expand_to_rows(weights.down_bias_EH, products.offsets_E, len(x_RH)).to(grad_probs_R.dtype)
            grad_probs_R += torch.linalg.vecdot(columns, bias_RH)
        grad_x, low_rank_g = products.input_gradient(GatheredRows(grad_g), weights.gate_EHF, pairs[0:2])
        grad_x_u, low_rank_u = products.input_gradient(GatheredRows(grad_u), weights.up_EHF, pairs[2:4])
        gradients = (
            *products.pair_gradients(rows, GatheredRows(grad_g), low_rank_g, pairs[0:2]),
            *products.pair_gradients(rows, GatheredRows(grad_u), low_rank_u, pairs[2:4]),
            *products.pair_gradients(GatheredRows(hidden_RF), grad_rows, low_rank_y, pairs[4:6]),
        )
        return grad_x.add_(grad_x_u), grad_probs_R, None, None, None, *gradients


@dataclass(frozen=True)
class _Products:
    """Products of the rows of each expert with its matrices, and their gradients."""

    ops: GroupedExpertOps
    offsets_E: Tensor
    scale: float

    def fc1(self, rows: GatheredRows, weights: ExpertWeights, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Compute gate and up projections of every row, [R, F] each."""
        g_RF = self.apply(rows, weights.gate_EHF, pairs[0:2])
        u_RF = self.apply(rows, weights.up_EHF, pairs[2:4])
        if weights.gate_bias_EF is not None and weights.up_bias_EF is not None:
            g_RF += expand_to_rows(weights.gate_bias_EF, self.offsets_E, len(g_RF))
            u_RF += expand_to_rows(weights.up_bias_EF, self.offsets_E, len(u_RF))
        return g_RF, u_RF

    def apply(self, rows: GatheredRows, w_EKN: Tensor, pair: Pairs) -> Tensor:
        """Compute x W + scale (x A) B of every row, [R, N]."""
        y_RN = self.ops.grouped_gemm(rows, w_EKN, self.offsets_E)
        if pair[0] is None or pair[1] is None:
            return y_RN
        return y_RN.add_(self._gemm(self._low_rank(rows, pair[0]), pair[1]))

    def input_gradient(self, grad: GatheredRows, w_EKN: Tensor, pair: Pairs) -> tuple[Tensor, Tensor | None]:
        """Compute the gradient of the rows, grad W^T + scale (grad B^T) A^T, [R, K], and scale grad B^T, [R, r]."""
        grad_x = self.ops.grouped_gemm(grad, w_EKN.transpose(1, 2), self.offsets_E)
        if pair[0] is None or pair[1] is None:
            return grad_x, None
        grad_low_rank = self._low_rank(grad, pair[1].transpose(1, 2))
        return grad_x.add_(self._gemm(grad_low_rank, pair[0].transpose(1, 2))), grad_low_rank

    def pair_gradients(
        self, rows: GatheredRows, grad: GatheredRows, grad_low_rank: Tensor | None, pair: Pairs
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of A and B: x^T (scale grad B^T), and scale (x A)^T grad."""
        if pair[0] is None or grad_low_rank is None:
            return NO_ADAPTER
        grad_a = self.ops.weight_gradient(rows, GatheredRows(grad_low_rank), self.offsets_E)
        low_rank = GatheredRows(self._low_rank(rows, pair[0]))
        return grad_a, self.ops.weight_gradient(low_rank, grad, self.offsets_E)

    def _low_rank(self, rows: GatheredRows, adapter_EKR: Tensor) -> Tensor:
        """Compute scale x A of every row, [R, r]."""
        return self.ops.grouped_gemm(rows, adapter_EKR, self.offsets_E) * self.scale

    def _gemm(self, x: Tensor, w_EKN: Tensor) -> Tensor:
        return self.ops.grouped_gemm(GatheredRows(x), w_EKN, self.offsets_E)
