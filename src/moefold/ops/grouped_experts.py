"""Expert operations on all experts at once: grouped GEMMs, activation and combine of all rows.

`GroupedExpertOps` computes them in PyTorch operations, expert by expert. Kernels override them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moefold.ops.expert_ops import (
    ExpertGradients,
    ExpertOptions,
    ExpertWeights,
    GatheredRows,
    LazyCounts,
    PermuteMap,
    rowwise_dot,
    scale_rows,
)
from moefold.ops.permute import sum_rows_per_token
from moefold.ops.swiglu import ExpertActivation


class GroupedExpertOps:
    """`ExpertOps` of grouped GEMMs that permute tokens while reading and combine expert outputs while writing.

    The operations of this class are the reference of the operations that override them, on every device and in every
    dtype. They synchronise to read row counts.
    """

    fuses_permutation = True
    probs_commute = True
    wgrad_reads_gathered_rows = True
    """True if `weight_gradient` reads `GatheredRows.materialized`."""

    def weight_dtype(self, x: Tensor) -> torch.dtype:
        """See `ExpertOps`."""
        return x.dtype

    def forward(
        self, x: Tensor, weights: ExpertWeights, options: ExpertOptions, probs_R: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ExpertOps`. It saves the offsets and, if asked, the gate and up projections."""
        offsets_E = row_offsets(options.tokens_per_expert, x.device)
        hidden, fc1_outputs = self.fc1_activation(_gather(x, options), weights, offsets_E, options, probs_R)
        saved = (offsets_E, *fc1_outputs)
        hidden_rows = GatheredRows(hidden)
        if weights.down_bias_EH is None:
            return self.grouped_gemm_combine(hidden_rows, weights.down_EFH, offsets_E, options.permute_map), saved
        y_RH = self.grouped_gemm(hidden_rows, weights.down_EFH, offsets_E)
        bias_RH = expand_to_rows(weights.down_bias_EH, offsets_E, len(y_RH))
        y_RH[:, options.bias_slice] += bias_RH if probs_R is None else scale_rows(bias_RH, probs_R)
        return y_RH if options.permute_map is None else self.combine(y_RH, options.permute_map), saved

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weights: ExpertWeights,
        options: ExpertOptions,
        probs_R: Tensor | None,
        saved: Sequence[Tensor],
    ) -> ExpertGradients:
        """See `ExpertOps`."""
        offsets_E, *fc1_outputs = saved
        x_rows = _gather(x, options)
        g, u = fc1_outputs if options.saves_fc1 else self.fc1(x_rows, weights, offsets_E)
        grad_rows = _gather(grad.contiguous(), options)
        if self.wgrad_reads_gathered_rows and not options.delays_wgrad:
            # The measured time of the next GEMM must not include the copy that the weight gradient needs anyway.
            _ = grad_rows.materialized
        grad_hidden = self.grouped_gemm(grad_rows, weights.down_EFH.transpose(1, 2), offsets_E)
        hidden, grad_g, grad_u, grad_probs_R = self.activation_backward(options.activation, grad_hidden, g, u, probs_R)
        if grad_probs_R is not None and weights.down_bias_EH is not None:
            bias_RH = expand_to_rows(weights.down_bias_EH, offsets_E, grad_rows.num_rows).to(grad_probs_R.dtype)
            columns = grad_rows.materialized[:, options.bias_slice].to(grad_probs_R.dtype)
            grad_probs_R += torch.linalg.vecdot(columns, bias_RH)
        gate_t = weights.gate_EHF.transpose(1, 2)
        up_term = (grad_u, weights.up_EHF.transpose(1, 2))
        grad_x = self.grouped_gemm_combine(GatheredRows(grad_g), gate_t, offsets_E, options.permute_map, up_term)

        # Delayed weight gradients gather their rows again, so that no gathered copy is kept until then.
        wgrad_x, wgrad_grad = (replace(r) if options.delays_wgrad else r for r in (x_rows, grad_rows))

        def weight_gradients() -> list[Tensor | None]:
            gradients: list[Tensor | None] = [
                self.weight_gradient(wgrad_x, GatheredRows(grad_g), offsets_E),
                self.weight_gradient(wgrad_x, GatheredRows(grad_u), offsets_E),
                self.weight_gradient(GatheredRows(hidden), wgrad_grad, offsets_E),
            ]
            if weights.gate_bias_EF is None:
                return [*gradients, None, None, None]
            grad_y = wgrad_grad.materialized[:, options.bias_slice]
            grad_y = grad_y if probs_R is None else scale_rows(grad_y, probs_R)
            has_undefined_rows = _may_have_undefined_rows(options)
            sums = (
                _sum_per_expert(rows, offsets_E, has_undefined_rows=has_undefined_rows)
                for rows in (grad_g, grad_u, grad_y)
            )
            return [*gradients, *sums]

        return ExpertGradients(grad_x, grad_probs_R, weight_gradients)

    def fc1_activation(
        self,
        rows: GatheredRows,
        weights: ExpertWeights,
        offsets_E: Tensor,
        options: ExpertOptions,
        probs_R: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the hidden values times the probabilities of the rows: (hidden values, projections to save)."""
        g, u = self.fc1(rows, weights, offsets_E)
        return self.activation(options.activation, g, u, probs_R), (g, u) if options.saves_fc1 else ()

    def fc1(self, rows: GatheredRows, weights: ExpertWeights, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
        """Compute gate and up projections of every row."""
        g = self.grouped_gemm(rows, weights.gate_EHF, offsets_E)
        u = self.grouped_gemm(rows, weights.up_EHF, offsets_E)
        if weights.gate_bias_EF is not None and weights.up_bias_EF is not None:
            g += expand_to_rows(weights.gate_bias_EF, offsets_E, len(g))
            u += expand_to_rows(weights.up_bias_EF, offsets_E, len(u))
        return g, u

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Multiply each row by the matrix of its expert, [R, N].

        Args:
            rows: [R, K].
            w_EKN: any strides.
            offsets_E: end offset of each expert's rows, int32 [E] on the device. Rows after the last are undefined.
            second: another pair of sorted rows and matrices, whose product is added.
        """
        y_RN = gemm_per_expert(torch.matmul, rows, w_EKN, offsets_E)
        return y_RN if second is None else y_RN.add_(self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E))

    def grouped_gemm_combine(
        self,
        rows: GatheredRows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        permute_map: PermuteMap | None,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute `grouped_gemm` and sum the rows of each token, [T, N]. Without a map return the rows, [R, N]."""
        y_RN = self.grouped_gemm(rows, w_EKN, offsets_E, second)
        return y_RN if permute_map is None else self.combine(y_RN, permute_map)

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """Compute rows.T @ grad over the rows of each expert, [E, K, N], or 0 for an expert without rows."""
        return weight_gradient_per_expert(torch.matmul, rows, grad, offsets_E)

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """Compute the activation times the probabilities of the rows, [R, F], without overwriting anything."""
        hidden_RF = activation.forward(g_RF, u_RF)
        return hidden_RF if probs_R is None else scale_rows(hidden_RF, probs_R)

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (scaled hidden values, gradients of g, of u and of the probabilities). It may overwrite `grad_RF`."""
        if probs_R is None:
            return *activation.backward(grad_RF, g_RF, u_RF), None
        hidden_RF, grad_g, grad_u = activation.backward(scale_rows(grad_RF, probs_R), g_RF, u_RF)
        dot_R = rowwise_dot(grad_RF, hidden_RF, probs_R.dtype)
        return scale_rows(hidden_RF, probs_R), grad_g, grad_u, dot_R

    def combine(self, rows_RH: Tensor, permute_map: PermuteMap) -> Tensor:
        """Sum the rows of each token, [T, H], in float32 at least."""
        return sum_rows_per_token(rows_RH, permute_map.row_TK, permute_map.kept_TK)


def gemm_per_expert(
    gemm: Callable[[Tensor, Tensor], Tensor], rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor
) -> Tensor:
    """Synchronise with the device, and compute gemm(rows, matrix) of each expert, [R, N], 0 after the last row."""
    *expert_rows, padding = _split_by_expert(rows, offsets_E)
    products = [gemm(x, w) for x, w in zip(expert_rows, w_EKN, strict=True)]
    return torch.cat([*products, padding.new_zeros(len(padding), w_EKN.shape[2])])


def weight_gradient_per_expert(
    gemm: Callable[[Tensor, Tensor], Tensor], rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor
) -> Tensor:
    """Synchronise with the device, and compute gemm(rows.T, grad) of each expert, [E, K, N]."""
    pairs = zip(_split_by_expert(rows, offsets_E)[:-1], _split_by_expert(grad, offsets_E)[:-1], strict=True)
    return torch.stack([gemm(x.t(), g) for x, g in pairs])


def _split_by_expert(rows: GatheredRows, offsets_E: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and then the rows after the last expert."""
    return rows.materialized.tensor_split(offsets_E.tolist())


def row_offsets(tokens_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """Return the end offset of each expert's rows, int32 [E] on the device, without a sync."""
    if isinstance(tokens_per_expert, LazyCounts):
        return tokens_per_expert.counts_E.cumsum(0, dtype=torch.int32)
    return torch.tensor(tokens_per_expert, dtype=torch.int32).to(device, non_blocking=True).cumsum(0, dtype=torch.int32)


def _gather(x: Tensor, options: ExpertOptions) -> GatheredRows:
    """Return the rows of tokens, which are gathered on read with a `permute_map`."""
    return GatheredRows(x) if options.permute_map is None else options.permute_map.gather(x)


def expand_to_rows(values_EN: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    """Gather the value of each row's expert, [R, N], or of any expert for the rows after the last expert."""
    row_R = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    expert_R = torch.searchsorted(offsets_E, row_R, right=True).clamp_(max=len(values_EN) - 1)
    return values_EN.index_select(0, expert_R)


def _sum_per_expert(values_RN: Tensor, offsets_E: Tensor, *, has_undefined_rows: bool) -> Tensor:
    """Sum the rows of each expert, [E, N], as a GEMM, so that the order of the sum is deterministic.

    Args:
        offsets_E: end offset of each expert's rows.
        has_undefined_rows: rows after the last expert's may be undefined.
    """
    row_R = torch.arange(len(values_RN), device=offsets_E.device)
    starts_E = torch.cat((offsets_E.new_zeros(1), offsets_E[:-1]))
    one_hot_ER = (row_R >= starts_E.unsqueeze(1)) & (row_R < offsets_E.unsqueeze(1))
    if has_undefined_rows:
        values_RN = values_RN.masked_fill((row_R >= offsets_E[-1]).unsqueeze(1), 0.0)
    return one_hot_ER.to(values_RN.dtype) @ values_RN


def _may_have_undefined_rows(options: ExpertOptions) -> bool:
    """Return whether rows without an expert may follow: rows of dropped tokens, or unused rows of a buffer."""
    permute_map = options.permute_map
    if permute_map is None:
        return isinstance(options.tokens_per_expert, LazyCounts)
    return permute_map.kept_TK is not None and not permute_map.has_padding
