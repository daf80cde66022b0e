"""The large operations of experts over rows that are sorted by expert: the seam at which kernels replace them.

A layer computes with `RowKernels` and does not know which; `PlainRows` is the twin in plain tensor maths that every
other one is tested against, on every device and in every type.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.moe.gate import Gate
from moefold.moe.permute import Permutation


@dataclass(frozen=True)
class Rows:
    """Rows that are sorted by expert once they are read: row i is values[source_R[i]], or zeros where that is -1."""

    values: Tensor
    source_R: Tensor | None = None
    """int32 [R]; None: the rows lie as they are."""

    @property
    def count(self) -> int:
        """R."""
        return len(self.values) if self.source_R is None else len(self.source_R)

    def gathered(self) -> Tensor:
        """The rows in memory of their own, where they do not lie so yet."""
        if self.source_R is None:
            return self.values
        if len(self.values) == 0:
            return self.values.new_zeros(self.count, self.values.shape[1])
        rows = self.values.index_select(0, self.source_R.clamp(min=0))
        return rows.masked_fill_((self.source_R < 0).unsqueeze(1), 0.0)


@dataclass(frozen=True)
class Sorting:
    """How rows are read sorted by expert, and how the results of each token are added up again."""

    source_R: Tensor
    """Token of each row, int32 [R]; -1 in an empty row."""
    row_TK: Tensor
    """Row of each copy, [T, K]."""
    present_TK: Tensor | None
    """Copies that have a row, bool [T, K]; None: all."""

    @staticmethod
    def of(permutation: Permutation) -> "Sorting":
        """The same, as kernels read it."""
        source_R = permutation.token_R.to(torch.int32)
        if permutation.filled_R is not None:
            source_R = source_R.masked_fill(~permutation.filled_R, -1)
        return Sorting(source_R, permutation.row_TK, permutation.present_TK)

    @staticmethod
    def of_order(order_R: Tensor, inverse_R: Tensor) -> "Sorting":
        """Row i is row order_R[i], and `inverse_R` undoes it."""
        return Sorting(order_R.to(torch.int32), inverse_R.unsqueeze(1), None)


class RowKernels(Protocol):
    """What an expert does with its rows; local, without autograd, never waiting for row counts."""

    @property
    def weighs_anywhere(self) -> bool:
        """Whether the weight of a row may as well multiply its hidden values as its result.

        Not where the hidden values are rounded to few bits: then the two are different numbers, and a mapping must not
        decide between them.
        """
        ...

    def product(
        self, rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Each row times the matrix of its expert, [R, N].

        Args:
            rows: [R, K].
            w_EKN: any strides.
            offsets_E: where the rows of each expert end, int32 [E] on the device; the last is R.
            second: other rows, which lie sorted, and other matrices, whose product is added.
        """
        ...

    def product_combined(
        self,
        rows: Rows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        sorting: Sorting,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`combine` of `product`, [T, N]."""
        ...

    def weight_gradient(self, rows: Rows, grad: Rows, offsets_E: Tensor) -> Tensor:
        """Rows.T @ grad over the rows of each expert, [E, K, N]; 0 for an expert without rows."""
        ...

    def gate(self, gate: Gate, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None) -> Tensor:
        """The hidden values times the weights of their rows, [R, F]; may overwrite nothing."""
        ...

    def gate_backward(
        self, gate: Gate, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(weighted hidden values, gradient of g, gradient of u, gradient of the weights); may overwrite `grad_RF`."""
        ...

    def combine(self, rows_RH: Tensor, sorting: Sorting) -> Tensor:
        """The sum of the rows of each token, [T, H], taken in float32 at least."""
        ...


class PlainRows:
    """One expert after another; waits for the row counts."""

    weighs_anywhere = True

    def product(
        self, rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `RowKernels`."""
        counts = counts_of(offsets_E)
        y = torch.cat([x @ w for x, w in zip(rows.gathered().split(counts), w_EKN, strict=True)])
        if second is None:
            return y
        return y.add_(torch.cat([x @ w for x, w in zip(second[0].split(counts), second[1], strict=True)]))

    def product_combined(
        self,
        rows: Rows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        sorting: Sorting,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `RowKernels`."""
        return self.combine(self.product(rows, w_EKN, offsets_E, second), sorting)

    def weight_gradient(self, rows: Rows, grad: Rows, offsets_E: Tensor) -> Tensor:
        """See `RowKernels`."""
        counts = counts_of(offsets_E)
        pairs = zip(rows.gathered().split(counts), grad.gathered().split(counts), strict=True)
        return torch.stack([x.t() @ g for x, g in pairs])

    def gate(self, gate: Gate, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None) -> Tensor:
        """See `RowKernels`."""
        hidden_RF = gate.forward(g_RF, u_RF)
        return hidden_RF if weights_R is None else scaled(hidden_RF, weights_R)

    def gate_backward(
        self, gate: Gate, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `RowKernels`."""
        if weights_R is None:
            return *gate.backward(grad_RF, g_RF, u_RF), None
        hidden_RF, grad_g, grad_u = gate.backward(scaled(grad_RF, weights_R), g_RF, u_RF)
        dtype = weights_R.dtype
        dot_R = torch.linalg.vecdot(grad_RF.to(dtype), hidden_RF.to(dtype))
        return scaled(hidden_RF, weights_R), grad_g, grad_u, dot_R

    def combine(self, rows_RH: Tensor, sorting: Sorting) -> Tensor:
        """See `RowKernels`."""
        row_TK, present_TK = sorting.row_TK, sorting.present_TK
        if len(rows_RH) == 0:
            return rows_RH.new_zeros(len(row_TK), rows_RH.shape[1])
        wide = torch.promote_types(rows_RH.dtype, torch.float32)
        factors_TK = None if present_TK is None else present_TK.to(wide)
        y_TH = F.embedding_bag(row_TK, rows_RH.to(wide), mode="sum", per_sample_weights=factors_TK)
        return y_TH.to(rows_RH.dtype)


def counts_of(offsets_E: Tensor) -> list[int]:
    """Rows of each expert; waits for the device."""
    stops = offsets_E.tolist()
    return [stop - start for start, stop in zip([0, *stops], stops, strict=False)]


def scaled(x_MF: Tensor, weights_M: Tensor) -> Tensor:
    """Rows times their weights, taken in the wider of the two types and given in that of the rows."""
    return (x_MF * weights_M.unsqueeze(1)).to(x_MF.dtype)
