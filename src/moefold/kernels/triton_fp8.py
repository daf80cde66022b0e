"""Blockwise FP8 on the matrix units of the device: the twin of the simulated products."""

import torch
from torch import Tensor

from moefold.kernels.measured import MeasuredChoice
from moefold.kernels.rows import Rows, Sorting
from moefold.kernels.triton_quantise import along_columns, along_rows, block_offsets, in_squares
from moefold.kernels.triton_rows import TritonRows, unit_stride
from moefold.kernels.triton_scaled import Narrow, scaled_rows, scaled_weights


class Fp8Rows(TritonRows):
    """`RowKernels` whose products round both operands to e4m3; what lies between them is as in `TritonRows`.

    Args:
        block: values that share a scale.
    """

    def __init__(self, block: int = 128) -> None:
        super().__init__(MeasuredChoice(measures=False))
        self._block = block

    @property
    def weighs_anywhere(self) -> bool:
        """See `RowKernels`."""
        return False

    def product(
        self, rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `RowKernels`."""
        values = unit_stride(rows.values)
        x = Narrow(*along_columns(values, rows.count, rows.source_R, self._block))
        w = Narrow(*in_squares(w_EKN, self._block))
        y_RN = values.new_empty(rows.count, w_EKN.shape[2])
        scaled_rows(x, w, offsets_E, self._block, y_RN)
        return y_RN if second is None else y_RN.add_(self.product(Rows(second[0]), second[1], offsets_E))

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
        x, g = (
            Narrow(*along_rows(unit_stride(r.values), r.count, r.source_R, offsets_E, self._block))
            for r in (rows, grad)
        )
        out = rows.values.new_empty(len(offsets_E), rows.values.shape[1], grad.values.shape[1])
        return scaled_weights(x, g, offsets_E, block_offsets(offsets_E, self._block), self._block, out)


class Fp8Products:
    """The products of a linear layer: those of one expert that has all rows.

    Args:
        rows: computes them.
    """

    def __init__(self, rows: Fp8Rows) -> None:
        self._rows = rows

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._rows.product(Rows(x_MK), w_NK.t().unsqueeze(0), _all_rows(x_MK))

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._rows.product(Rows(grad_MN), w_NK.unsqueeze(0), _all_rows(grad_MN))

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._rows.weight_gradient(Rows(grad_MN), Rows(x_MK), _all_rows(x_MK)).squeeze(0)


def _all_rows(x: Tensor) -> Tensor:
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
