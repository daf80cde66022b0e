"""Expert operations of torch's libraries: grouped_mm on GPUs that have it, otherwise one expert after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.ops.cpu.experts import SequentialExpertOps
from moefold.ops.expert_ops import ExpertGradients, ExpertOps, ExpertOptions, ExpertWeights, GatheredRows
from moefold.ops.gemm import TORCH_GEMM
from moefold.ops.grouped_experts import GroupedExpertOps

GROUPED_MM_ALIGNMENT_BYTES = 16
"""Alignment of every stride that torch's grouped_mm requires."""
FIRST_CAPABILITY_WITHOUT_ZEROS = (10, 0)
"""First compute capability where grouped_mm does not write zeros to the weight gradient of an expert without rows
(pytorch issues 172439 and 193633)."""


def leaves_empty_experts_unwritten(device: torch.device) -> bool:
    """Return whether grouped_mm leaves the weight gradient of an expert without rows unwritten on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY_WITHOUT_ZEROS


@dataclass(frozen=True)
class GroupedMMExpertOps(GroupedExpertOps):
    """One grouped_mm for each projection of all experts. It needs at least one row, and tokens sorted by expert.

    Args:
        grouped_mm: torch's operation.
        needs_zeroing: whether weight gradients of experts without rows must be zeroed on a device.
    """

    fuses_permutation = False
    grouped_mm: Callable[..., Tensor] = F.grouped_mm
    needs_zeroing: Callable[[torch.device], bool] = leaves_empty_experts_unwritten

    def grouped_gemm(
        self, rows: GatheredRows, w_EKN: Tensor, offsets_E: Tensor, second: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """See base class."""
        y = self.grouped_mm(rows.materialized, w_EKN, offs=offsets_E)
        return y if second is None else y.add_(self.grouped_mm(second[0], second[1], offs=offsets_E))

    def weight_gradient(self, rows: GatheredRows, grad: GatheredRows, offsets_E: Tensor) -> Tensor:
        """See base class."""
        gradient_EKN = self.grouped_mm(rows.materialized.t(), grad.materialized, offs=offsets_E)
        if not self.needs_zeroing(gradient_EKN.device):
            return gradient_EKN
        is_empty_E = offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0
        return gradient_EKN.masked_fill_(is_empty_E.view(-1, 1, 1), 0.0)


class TorchExpertOps:
    """`ExpertOps` that choose the fastest operations of torch for the tensors of each call."""

    fuses_permutation = False
    probs_commute = True

    def __init__(self) -> None:
        self._grouped = GroupedMMExpertOps()
        self._sequential = SequentialExpertOps(TORCH_GEMM)

    def weight_dtype(self, x: Tensor) -> torch.dtype | None:
        """See `ExpertOps`."""
        return self._sequential.weight_dtype(x)

    def forward(
        self, x: Tensor, weights: ExpertWeights, options: ExpertOptions, probs_R: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ExpertOps`."""
        return self._fastest(x, weights).forward(x, weights, options, probs_R)

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
        return self._fastest(x, weights).backward(grad, x, weights, options, probs_R, saved)

    def _fastest(self, x: Tensor, weights: ExpertWeights) -> ExpertOps:
        widths = (weights.gate_EHF.shape[2], weights.down_EFH.shape[2])
        return self._grouped if supports_grouped_mm(x, len(x), *widths) else self._sequential


TORCH_EXPERT_OPS = TorchExpertOps()


def supports_grouped_mm(x: Tensor, num_rows: int, *widths: int) -> bool:
    """Return whether the device's grouped_mm supports rows like the rows of x, multiplied to these widths."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or num_rows == 0:
        return False
    is_aligned = all(width * x.element_size() % GROUPED_MM_ALIGNMENT_BYTES == 0 for width in (x.shape[1], *widths))
    return is_aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)
