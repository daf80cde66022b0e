"""`RowKernels` by Triton, with torch's grouped product where that is measured to be faster."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.kernels.measured import MeasuredChoice
from moefold.kernels.rows import Rows, Sorting
from moefold.kernels.triton_gate import gate_backward, gate_forward
from moefold.kernels.triton_grouped import combine_rows, grouped_rows, grouped_weights, tilings
from moefold.moe.gate import ClampedGate, Gate

GROUPED_ALIGNMENT_BYTES = 16
"""torch's grouped product wants every stride to be a multiple of this."""


@dataclass(frozen=True)
class TritonRows:
    """Gathers rows as the products read them; nothing waits for the host.

    Args:
        choice: remembers which way is fastest for a shape.
    """

    choice: MeasuredChoice

    @property
    def weighs_anywhere(self) -> bool:
        """See `RowKernels`."""
        return True

    def product(
        self, rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See `RowKernels`."""
        x = unit_stride(rows.values)
        if second is not None:
            second = unit_stride(second[0]), second[1]
        ways: dict[str, Callable[[], Tensor]] = {}
        if _torch_can(rows, w_EKN):
            ways["torch"] = partial(_torch_product, rows, w_EKN, offsets_E, second)
        for tiling in tilings(x):
            ways[f"triton {tiling.rows}x{tiling.columns}"] = partial(
                grouped_rows, x, w_EKN, offsets_E, rows.count, source_R=rows.source_R, second=second, tiling=tiling
            )
        return self._run("product", rows, w_EKN.shape, w_EKN.stride(2) == 1, second is not None, ways=ways)

    def product_combined(
        self,
        rows: Rows,
        w_EKN: Tensor,
        offsets_E: Tensor,
        sorting: Sorting,
        second: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `RowKernels`; adds rows up as they are written where that is faster and the order of sums is free."""
        x = unit_stride(rows.values)
        target = sorting.source_R, len(sorting.row_TK)

        def scattered() -> Tensor:
            pair = None if second is None else (unit_stride(second[0]), second[1])
            y_TN = grouped_rows(x, w_EKN, offsets_E, rows.count, source_R=rows.source_R, second=pair, target=target)
            return y_TN.to(x.dtype)

        ways = {
            "gather": lambda: self.combine(self.product(rows, w_EKN, offsets_E, second), sorting),
            "scatter": scattered,
        }
        return self._run("combined", rows, w_EKN.shape, w_EKN.stride(2) == 1, second is not None, ways=ways)

    def weight_gradient(self, rows: Rows, grad: Rows, offsets_E: Tensor) -> Tensor:
        """See `RowKernels`."""
        x, g = unit_stride(rows.values), unit_stride(grad.values)
        ways: dict[str, Callable[[], Tensor]] = {}
        if _torch_can(rows, g):
            ways["torch"] = lambda: F.grouped_mm(rows.gathered().t(), grad.gathered(), offs=offsets_E)
        for tiling in tilings(x):
            ways[f"triton {tiling.rows}x{tiling.columns}"] = partial(
                grouped_weights,
                x,
                g,
                offsets_E,
                source_R=rows.source_R,
                grad_source_R=grad.source_R,
                tiling=tiling,
            )
        return self._run("weights", rows, (len(offsets_E), g.shape[1]), grad.source_R is not None, ways=ways)

    def gate(self, gate: Gate, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None) -> Tensor:
        """See `RowKernels`."""
        return gate_forward(g_RF, u_RF, weights_R, clamp_of(gate))

    def gate_backward(
        self, gate: Gate, grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, weights_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `RowKernels`."""
        return gate_backward(grad_RF, g_RF, u_RF, weights_R, clamp_of(gate))

    def silu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """See `moefold.model.gated.GateKernel`."""
        return gate_forward(g_MF.contiguous(), u_MF.contiguous(), None, None)

    def silu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """See `moefold.model.gated.GateKernel`."""
        _, grad_g, grad_u, _ = gate_backward(grad_MF.contiguous(), g_MF.contiguous(), u_MF.contiguous(), None, None)
        return grad_g, grad_u

    def combine(self, rows_RH: Tensor, sorting: Sorting) -> Tensor:
        """See `RowKernels`."""
        return combine_rows(unit_stride(rows_RH), sorting.row_TK, sorting.present_TK)

    def _run(self, what: str, rows: Rows, *shape: Hashable, ways: dict[str, Callable[[], Tensor]]) -> Tensor:
        # Counts change from step to step: those of one octave share a choice.
        key = (what, rows.count.bit_length(), rows.values.shape[1], rows.source_R is not None, *shape)
        return self.choice.run(key, ways, rows.values.device)


def clamp_of(gate: Gate) -> tuple[float, float] | None:
    """(alpha, limit) of the clamped gate, None for SwiGLU."""
    return (gate.alpha, gate.limit) if isinstance(gate, ClampedGate) else None


def _torch_product(
    rows: Rows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None
) -> Tensor:  # pragma: no cover - CUDA alone
    y = F.grouped_mm(rows.gathered(), w_EKN, offs=offsets_E)
    return y if second is None else y.add_(F.grouped_mm(second[0], second[1], offs=offsets_E))


def _torch_can(rows: Rows, other: Tensor) -> bool:
    x = rows.values
    if not x.is_cuda or x.dtype != torch.bfloat16 or rows.count == 0:
        return False
    widths = (x.shape[1], *other.shape[-2:]) if other.dim() == 3 else (x.shape[1], other.shape[1])
    is_aligned = all(width * x.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for width in widths)
    return is_aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def unit_stride(x: Tensor) -> Tensor:
    """Kernels take the last dim to be contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
