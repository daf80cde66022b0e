"""Linear layers of `fp8-blockwise` with the FP8 GEMMs of cuBLAS, through `torch.nn.functional.scaled_mm`.

**Not run on a GPU.** torch documents the layout of the scales in its meta function. Scales of blocks [1, 128] are
stored by blocks, [K/128, M], as our quantisers write them. Scales of blocks [128, 128] are stored as [N/128, K/128],
K/128 padded to a multiple of 4. The tests bind each call to torch's signature and to these checks. It is used only
after `scaled_mm_unsupported_reason` has compared its GEMMs with the emulation on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.autotune import TuningKey
from moefold.ops.expert_ops import unit_stride
from moefold.ops.quantization.scaled_mm import torch_scaled_mm
from moefold.ops.triton.fp8_gemm import Fp8ExpertOps, Fp8Linear, single_expert_offsets
from moefold.ops.triton.quantize import QuantizedTensor, quantize_columns, quantize_rows

SCALE_ROW_MULTIPLE = 4
"""The scales of a row of blocks [128, 128] are padded to a multiple of this."""
SCALED_MM_BLOCK = 128


class ScaledMMFp8Linear(Fp8Linear):
    """FP8 linear backend of cuBLAS for bfloat16 and whole blocks, where it is faster, otherwise our kernels.

    Args:
        expert_ops: quantises weights, and computes the other GEMMs.
        scaled_mm: `torch.nn.functional.scaled_mm` (also for None), or an emulation of it.
    """

    def __init__(self, expert_ops: Fp8ExpertOps, scaled_mm: Callable[..., Tensor] | None = None) -> None:
        super().__init__(expert_ops)
        self._scaled_mm = scaled_mm or torch_scaled_mm

    def matmul(self, x_MK: Tensor, w_KN: Tensor) -> Tensor:
        """See base class."""
        kernels = partial(super().matmul, x_MK, w_KN)
        if not self._takes(x_MK, len(x_MK), *w_KN.shape):
            return kernels()
        return self._fastest("FP8 product", len(x_MK), w_KN.shape, partial(self._matmul, x_MK, w_KN), kernels)

    def _matmul(self, x_MK: Tensor, w_KN: Tensor) -> Tensor:
        x = quantize_rows(unit_stride(x_MK), len(x_MK), None, self.expert_ops.block_size)
        w = self.expert_ops.quantized_weights(w_KN.unsqueeze(0))
        w_scales = F.pad(w.scales[0], (0, -w.scales.shape[2] % SCALE_ROW_MULTIPLE))
        return self._multiply(x, w.values[0], w_scales, F.ScalingType.BlockWise128x128)

    def weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        """See base class."""
        kernels = partial(super().weight_gradient, grad_MN, x_MK)
        widths = x_MK.shape[1], grad_MN.shape[1]
        if not self._takes(x_MK, len(x_MK), *widths):
            return kernels()
        return self._fastest("FP8 weights", len(x_MK), widths, partial(self._weight_gradient, grad_MN, x_MK), kernels)

    def _weight_gradient(self, grad_MN: Tensor, x_MK: Tensor) -> Tensor:
        num_rows = len(x_MK)
        offsets = single_expert_offsets(x_MK)
        grad, x = (
            quantize_columns(unit_stride(operand), num_rows, None, offsets, self.expert_ops.block_size)
            for operand in (grad_MN, x_MK)
        )
        # Without the space for an incomplete block.
        num_blocks = num_rows // SCALED_MM_BLOCK
        grad, x = (QuantizedTensor(o.values[:, :num_rows], o.scales[:num_blocks]) for o in (grad, x))
        return self._multiply(grad, x.values, x.scales, F.ScalingType.BlockWise1x128)

    def _fastest(
        self,
        op: str,
        num_rows: int,
        widths: tuple[int, ...],
        cublas: Callable[[], Tensor],
        kernels: Callable[[], Tensor],
    ) -> Tensor:
        tuner = self.expert_ops.autotuner
        if not tuner.is_enabled:
            return cublas()
        candidates = {"cuBLAS": cublas, "triton": kernels}
        return candidates[tuner.choose(TuningKey(op, num_rows, tuple(widths)), candidates)]()

    def _takes(self, x: Tensor, *sizes: int) -> bool:
        is_whole = all(size > 0 and size % SCALED_MM_BLOCK == 0 for size in sizes)
        return x.dtype == torch.bfloat16 and self.expert_ops.block_size == SCALED_MM_BLOCK and is_whole

    def _multiply(self, a: QuantizedTensor, b_values: Tensor, b_scales: Tensor, b_recipe: Any) -> Tensor:
        """Compute a @ b.T in bfloat16. The scales of b are stored transposed, like the scales of a."""
        no_swizzle = F.SwizzleType.NO_SWIZZLE
        return self._scaled_mm(
            a.values, b_values.t(), a.scales.t(), F.ScalingType.BlockWise1x128, b_scales.t(), b_recipe,
            no_swizzle, no_swizzle, output_dtype=torch.bfloat16,
        )  # fmt: skip
