"""Blockwise FP8 on the matrix units of the device: the twin of the simulated products."""

import torch
from torch import Tensor

from moefold.kernels.measured import Autotuner
from moefold.kernels.rows import GatheredRows, PermuteMap
from moefold.kernels.triton_quantise import block_offsets, quantize_2d_blocks, quantize_columnwise, quantize_rowwise
from moefold.kernels.triton_rows import TritonExpertOps, unit_stride
from moefold.kernels.triton_scaled import QuantizedTensor, scaled_grouped_gemm, scaled_grouped_gemm_weight_grad


class Fp8ExpertOps(TritonExpertOps):
    """`ExpertOps` whose products round both operands to e4m3; what lies between them is as in `TritonExpertOps`.

    Args:
        block_size: values that share a scale.
    """

    def __init__(self, block_size: int = 128) -> None:
        super().__init__(Autotuner(is_enabled=False))
        self._block_size = block_size

    @property
    def probs_commute(self) -> bool:
        """See `ExpertOps`."""
        return False

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `ExpertOps`."""
        values = unit_stride(rows.values)
        x = QuantizedTensor(*quantize_rowwise(values, rows.num_rows, rows.source_R, self._block_size))
        w = QuantizedTensor(*quantize_2d_blocks(w_EKN, self._block_size))
        y_RN = values.new_empty(rows.num_rows, w_EKN.shape[2])
        scaled_grouped_gemm(x, w, offsets_E, self._block_size, y_RN)
        return y_RN if second is None else y_RN.add_(self.grouped_gemm(GatheredRows(second[0]), second[1], offsets_E))

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
        x, g = (
            QuantizedTensor(
                *quantize_columnwise(unit_stride(r.values), r.num_rows, r.source_R, offsets_E, self._block_size)
            )
            for r in (rows, grad)
        )
        out = rows.values.new_empty(len(offsets_E), rows.values.shape[1], grad.values.shape[1])
        return scaled_grouped_gemm_weight_grad(
            x, g, offsets_E, block_offsets(offsets_E, self._block_size), self._block_size, out
        )


class Fp8Linear:
    """The products of a linear layer: those of one expert that has all rows.

    Args:
        expert_ops: computes them.
    """

    def __init__(self, expert_ops: Fp8ExpertOps) -> None:
        self._expert_ops = expert_ops

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._expert_ops.grouped_gemm(GatheredRows(x_MK), w_NK.t().unsqueeze(0), _single_expert_offsets(x_MK))

    def input_gradient(self, grad_MN: Tensor, w_NK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._expert_ops.grouped_gemm(GatheredRows(grad_MN), w_NK.unsqueeze(0), _single_expert_offsets(grad_MN))

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See `moefold.model.linear.Products`."""
        return self._expert_ops.weight_gradient(
            GatheredRows(grad_MN), GatheredRows(x_MK), _single_expert_offsets(x_MK)
        ).squeeze(0)


def _single_expert_offsets(x: Tensor) -> Tensor:
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
