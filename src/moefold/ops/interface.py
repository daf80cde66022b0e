"""The large operations of experts over rows that are sorted by expert: the seam at which kernels replace them.

A layer computes with `ExpertOps` and does not know which; `TorchExpertOps` is the twin in plain tensor maths that every
other one is tested against, on every device and in every type.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.swiglu import ExpertActivation


@dataclass(frozen=True)
class Permutation:
    """Which copy of which token stands in which row; rows are sorted by expert, unless they were rearranged.

    Copies may be absent (dropped, or another rank's) and rows may be empty (padding); a mask is None where none are.
    """

    token_R: Tensor
    """Token of each row, int64 [R]; 0 in an empty row."""
    topk_index_R: Tensor
    """Copy t*K + k in each row, int64 [R]; 0 in an empty row."""
    row_TK: Tensor
    """Row of each copy, int64 [T, K]; 0 for an absent copy."""
    tokens_per_expert_E: Tensor
    """int64 [E]; sums to R."""
    kept_TK: Tensor | None
    """bool [T, K]."""
    non_padding_R: Tensor | None
    """bool [R]."""


@dataclass(frozen=True)
class GatheredRows:
    """Rows that are sorted by expert once they are read: row i is values[source_R[i]], or zeros where that is -1."""

    values: Tensor
    source_R: Tensor | None = None
    """int32 [R]; None: the rows lie as they are."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.values) if self.source_R is None else len(self.source_R)

    def materialize(self) -> Tensor:
        """The rows in memory of their own, where they do not lie so yet."""
        if self.source_R is None:
            return self.values
        if len(self.values) == 0:
            return self.values.new_zeros(self.num_rows, self.values.shape[1])
        rows = self.values.index_select(0, self.source_R.clamp(min=0))
        return rows.masked_fill_((self.source_R < 0).unsqueeze(1), 0.0)


@dataclass(frozen=True)
class PermuteMap:
    """How rows are read sorted by expert, and how the results of each token are added up again."""

    source_R: Tensor
    """Token of each row, int32 [R]; -1 in an empty row."""
    row_TK: Tensor
    """Row of each copy, [T, K]."""
    kept_TK: Tensor | None
    """Copies that have a row, bool [T, K]; None: all."""

    @staticmethod
    def from_permutation(permutation: Permutation) -> "PermuteMap":
        """The same, as kernels read it."""
        source_R = permutation.token_R.to(torch.int32)
        if permutation.non_padding_R is not None:
            source_R = source_R.masked_fill(~permutation.non_padding_R, -1)
        return PermuteMap(source_R, permutation.row_TK, permutation.kept_TK)

    @staticmethod
    def from_order(order_R: Tensor, inverse_R: Tensor) -> "PermuteMap":
        """Row i is row order_R[i], and `inverse_R` undoes it."""
        return PermuteMap(order_R.to(torch.int32), inverse_R.unsqueeze(1), None)


class ExpertOps(Protocol):
    """What an expert does with its rows; local, without autograd, never waiting for row counts."""

    @property
    def probs_commute(self) -> bool:
        """Whether the weight of a row may as well multiply its hidden values as its result.

        Not where the hidden values are rounded to few bits: then the two are different numbers, and a mapping must not
        decide between them.
        """
        ...

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Each row times the matrix of its expert, [R, N].

        Args:
            rows: [R, K].
            w_EKN: any strides.
            offsets_E: where the rows of each expert end, int32 [E] on the device; the last is R.
            second: other rows, which lie sorted, and other matrices, whose product is added.
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
        """`combine` of `grouped_gemm`, [T, N]."""
        ...

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """Rows.T @ grad over the rows of each expert, [E, K, N]; 0 for an expert without rows."""
        ...

    def activation(self, activation: ExpertActivation, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None) -> Tensor:
        """The hidden values times the weights of their rows, [R, F]; may overwrite nothing."""
        ...

    def activation_backward(
        self, activation: ExpertActivation, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(weighted hidden values, gradient of g, gradient of u, gradient of the weights); may overwrite `grad_RF`."""
        ...

    def combine(self, rows_RH: Tensor, permute_map: PermuteMap) -> Tensor:
        """The sum of the rows of each token, [T, H], taken in float32 at least."""
        ...


class TorchExpertOps:
    """One expert after another; waits for the row counts."""

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
        present_TK = permute_map.kept_TK
        if len(rows_RH) == 0:
            return rows_RH.new_zeros(len(row_TK), rows_RH.shape[1])
        wide = torch.promote_types(rows_RH.dtype, torch.float32)
        factors_TK = None if present_TK is None else present_TK.to(wide)
        y_TH = F.embedding_bag(row_TK, rows_RH.to(wide), mode="sum", per_sample_weights=factors_TK)
        return y_TH.to(rows_RH.dtype)


def counts_from_offsets(offsets_E: Tensor) -> list[int]:
    """Rows of each expert; waits for the device."""
    stops = offsets_E.tolist()
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def scale_rows(x_MF: Tensor, scales_M: Tensor) -> Tensor:
    """Rows times their weights, taken in the wider of the two types and given in that of the rows."""
    return (x_MF * scales_M.unsqueeze(1)).to(x_MF.dtype)
