"""Emulated low-precision GEMMs of a linear layer, on every device.

Operands are rounded to the format and multiplied in float32 (float64 in float64). The hardware computes the same except
for the order of its sums. Rounding is to nearest. There is no stochastic rounding and no Hadamard transform.
"""

from dataclasses import dataclass

from torch import Tensor

from moefold.ops.expert_ops import GatheredRows
from moefold.ops.grouped_experts import GroupedExpertOps, gemm_per_expert, weight_gradient_per_expert
from moefold.ops.quantization.formats import QuantFormat, fake_quantize


@dataclass(frozen=True)
class EmulatedLinear:
    """Linear backend that quantises, dequantises and multiplies."""

    quant_format: QuantFormat

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`."""
        return self.quantized_matmul(x_MK, w_NK, self.quant_format.weight_block_rows)

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`."""
        return self.quantized_matmul(grad_MN, w_NK.t(), self.quant_format.weight_block_rows)

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `moefold.model.linear.LinearBackend`. Blocks are 128, 32 or 16 consecutive tokens of this rank."""
        return self.quantized_matmul(grad_MN.t(), x_MK.t(), 1)

    def quantized_matmul(self, a_MK: Tensor, b_NK: Tensor, b_block_rows: int) -> Tensor:
        """Compute a @ b.T, both quantised in blocks along K. Blocks of b have `b_block_rows` rows."""
        y_MN = fake_quantize(a_MK, self.quant_format) @ fake_quantize(b_NK, self.quant_format, b_block_rows).t()
        return y_MN.to(a_MK.dtype)


class EmulatedExpertOps(GroupedExpertOps):
    """Expert operations with emulated low-precision GEMMs: each expert is a linear layer over its rows."""

    probs_commute = False

    def __init__(self, linear: EmulatedLinear) -> None:
        self._linear = linear

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class."""
        weight_rows = self._linear.quant_format.weight_block_rows

        def gemm(x_MK: Tensor, w_KN: Tensor) -> Tensor:
            return self._linear.quantized_matmul(x_MK, w_KN.t(), weight_rows)

        y_RN = gemm_per_expert(gemm, rows, w_EKN, offsets_E)
        return y_RN if second is None else y_RN.add_(self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E))

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class."""

        def gemm(x_KM: Tensor, grad_MN: Tensor) -> Tensor:
            return self._linear.quantized_matmul(x_KM, grad_MN.t(), 1)

        return weight_gradient_per_expert(gemm, rows, grad, offsets_E)
