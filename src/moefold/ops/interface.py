"""Interface of the expert operations over tokens sorted by expert, which device kernels implement.

`TorchExpertOps` is the reference implementation in PyTorch operations, against which every other one is tested, on
every device and in every dtype.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.swiglu import ExpertActivation


@dataclass(frozen=True)
class Permutation:
    """Permutation of routed tokens into rows sorted by expert, unless they were reordered.

    Routed tokens may be absent (dropped, or another rank's) and rows may be empty (padding); masks are None if none
    are.
    """

    token_R: Tensor
    """Token of each row, int64 [R]; 0 in a padding row."""
    topk_index_R: Tensor
    """Index t*K + k of each row's routed token, int64 [R]; 0 in a padding row."""
    row_TK: Tensor
    """Row of each routed token, int64 [T, K]; 0 for an absent one."""
    tokens_per_expert_E: Tensor
    """int64 [E]; sums to R."""
    kept_TK: Tensor | None
    """bool [T, K]."""
    non_padding_R: Tensor | None
    """bool [R]."""


@dataclass(frozen=True)
class GatheredRows:
    """Rows gathered on read: row i is values[source_R[i]], or zeros where that is -1."""

    values: Tensor
    source_R: Tensor | None = None
    """int32 [R]; None: `values` are the rows."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.values) if self.source_R is None else len(self.source_R)

    def materialize(self) -> Tensor:
        """Return the gathered rows as a tensor."""
        if self.source_R is None:
            return self.values
        if len(self.values) == 0:
            return self.values.new_zeros(self.num_rows, self.values.shape[1])
        rows = self.values.index_select(0, self.source_R.clamp(min=0))
        return rows.masked_fill_((self.source_R < 0).unsqueeze(1), 0.0)


@dataclass(frozen=True)
class PermuteMap:
    """Permutation as kernels use it: rows gathered on read, and outputs summed for each token."""

    source_R: Tensor
    """Token of each row, int32 [R]; -1 in a padding row."""
    row_TK: Tensor
    """Row of each routed token, [T, K]."""
    kept_TK: Tensor | None
    """Routed tokens that have a row, bool [T, K]; None: all."""

    @staticmethod
    def from_permutation(permutation: Permutation) -> "PermuteMap":
        """Convert a permutation for kernels."""
        source_R = permutation.token_R.to(torch.int32)
        if permutation.non_padding_R is not None:
            source_R = source_R.masked_fill(~permutation.non_padding_R, -1)
        return PermuteMap(source_R, permutation.row_TK, permutation.kept_TK)

    @staticmethod
    def from_order(order_R: Tensor, inverse_R: Tensor) -> "PermuteMap":
        """Build a map where row i is row order_R[i], with inverse `inverse_R`."""
        return PermuteMap(order_R.to(torch.int32), inverse_R.unsqueeze(1), None)


class ExpertOps(Protocol):
    """Operations of experts on their rows; local, without autograd, without syncs for row counts."""

    @property
    def probs_commute(self) -> bool:
        """True if routing probabilities may scale the expert's hidden values instead of its output.

        False where hidden values are quantised: the results would then differ, and the parallel mapping must not decide
        between them.
        """
        ...

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Multiply each row by the matrix of its expert, [R, N].

        Args:
            rows: [R, K].
            w_EKN: any strides.
            offsets_E: end offset of each expert's rows, int32 [E] on the device; the last is R.
            second: another pair of sorted rows and matrices, whose product is added.
        """
        ...

    def grouped_gemm_combine(
        self,
        rows: GatheredRows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        permute_map: PermuteMap,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute `combine` of `grouped_gemm`, [T, N]."""
        ...

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """Compute rows.T @ grad over the rows of each expert, [E, K, N]; 0 for an expert without rows."""
        ...

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """Compute the activation times the probabilities of the rows, [R, F]; overwrites nothing."""
        ...

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (scaled hidden values, gradients of g, of u and of the probabilities); may overwrite `grad_RF`."""
        ...

    def combine(self, rows_RH: Tensor, permute_map: PermuteMap) -> Tensor:
        """Sum the rows of each token, [T, H], in float32 at least."""
        ...


class TorchExpertOps:
    """Reference implementation, expert by expert; synchronises to read row counts."""

    probs_commute = True

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `ExpertOps`."""
        counts = counts_from_offsets(offsets_E)
        y = torch.cat([x @ w for x, w in zip(rows.materialize().split(counts), w_EKN, strict=True)])
        if second is None:
            return y
        return y.add_(torch.cat([x @ w for x, w in zip(second[0].split(counts), second[1], strict=True)]))

    def grouped_gemm_combine(
        self,
        rows: GatheredRows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        permute_map: PermuteMap,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertOps`."""
        return self.combine(self.grouped_gemm(rows, w_EKN, offsets_E, second), permute_map)

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See `ExpertOps`."""
        counts = counts_from_offsets(offsets_E)
        pairs = zip(rows.materialize().split(counts), grad.materialize().split(counts), strict=True)
        return torch.stack([x.t() @ g for x, g in pairs])

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """See `ExpertOps`."""
        hidden_RF = activation.forward(g_RF, u_RF)
        return hidden_RF if probs_R is None else scale_rows(hidden_RF, probs_R)

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `ExpertOps`."""
        if probs_R is None:
            return *activation.backward(grad_RF, g_RF, u_RF), None
        hidden_RF, grad_g, grad_u = activation.backward(scale_rows(grad_RF, probs_R), g_RF, u_RF)
        dtype = probs_R.dtype
        dot_R = torch.linalg.vecdot(grad_RF.to(dtype), hidden_RF.to(dtype))
        return scale_rows(hidden_RF, probs_R), grad_g, grad_u, dot_R

    def combine(self, rows_RH: Tensor, permute_map: PermuteMap) -> Tensor:
        """See `ExpertOps`."""
        row_TK = permute_map.row_TK
        kept_TK = permute_map.kept_TK
        if len(rows_RH) == 0:
            return rows_RH.new_zeros(len(row_TK), rows_RH.shape[1])
        accum_dtype = torch.promote_types(rows_RH.dtype, torch.float32)
        weights_TK = None if kept_TK is None else kept_TK.to(accum_dtype)
        y_TH = F.embedding_bag(row_TK, rows_RH.to(accum_dtype), mode="sum", per_sample_weights=weights_TK)
        return y_TH.to(rows_RH.dtype)


def counts_from_offsets(offsets_E: Tensor) -> list[int]:
    """Return the rows of each expert; synchronises with the device."""
    stops = offsets_E.tolist()
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def scale_rows(x_MF: Tensor, scales_M: Tensor) -> Tensor:
    """Scale rows in the higher precision of the two dtypes; returns the dtype of the rows."""
    return (x_MF * scales_M.unsqueeze(1)).to(x_MF.dtype)
