"""Softmax statistics of logits on a CPU in C, in two passes over memory; `CrossEntropyOps`."""

import torch
from torch import Tensor

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, address_of, check_results, declare, load_library
from moefold.ops.cross_entropy import TORCH_CROSS_ENTROPY_OPS, RowStatistics, TorchCrossEntropyOps

SELF_TEST_WIDTHS = (3, 200)
"""Widths of the rows of the self-test: less than a block of `cross_entropy.c`, and not a multiple of one."""
TOLERANCE = 2e-6


class CCrossEntropyOps(TorchCrossEntropyOps):
    """Statistics of float32 logits in C; torch's operations for other logits, and for the gradient."""

    def __init__(self) -> None:
        pointers = [POINTER] * 6
        self._statistics = declare(
            load_library("cross_entropy").cross_entropy_statistics, *pointers, SIZE, SIZE, NUMBER
        )
        self._self_test()

    def statistics(self, logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
        """See `CrossEntropyOps`."""
        return self._compute(logits_CV, row_C, None) if _supports(logits_CV) else super().statistics(logits_CV, row_C)

    def exponentiate_(self, logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
        """See `CrossEntropyOps`."""
        if not _supports(logits_CV):
            return super().exponentiate_(logits_CV, row_C)
        return self._compute(logits_CV, row_C, logits_CV)

    def _compute(self, logits_CV: Tensor, row_C: Tensor, exps_CV: Tensor | None) -> RowStatistics:
        # The C code has no bounds checks.
        rows, width = logits_CV.shape
        assert row_C.shape == (rows,), (row_C.shape, logits_CV.shape)
        assert not rows or int(row_C.max()) < width, (int(row_C.max()), width)
        labels = row_C.to(torch.int64).contiguous()
        statistics = RowStatistics(*(logits_CV.new_empty(rows) for _ in RowStatistics._fields))
        outputs = (address_of(exps_CV), labels.data_ptr(), *(values.data_ptr() for values in statistics))
        self._statistics(logits_CV.data_ptr(), *outputs, rows, width, torch.get_num_threads())
        return statistics

    def _self_test(self) -> None:
        """Compare with torch's operations in float64."""
        for width in SELF_TEST_WIDTHS:
            logits = torch.linspace(-40, 30, 7 * width).sin().mul(20).view(7, width)
            labels = torch.arange(7) % (width + 1) - 1
            exps = logits.double()
            expected = TORCH_CROSS_ENTROPY_OPS.exponentiate_(exps, labels)
            actual = self.statistics(logits, labels)
            check_results("softmax statistics", logits.dtype, actual, expected, TOLERANCE)
            self.exponentiate_(logits, labels)
            check_results("exponentials of logits", logits.dtype, [logits], [exps], TOLERANCE)


def _supports(logits_CV: Tensor) -> bool:
    return logits_CV.is_cpu and logits_CV.dtype == torch.float32 and logits_CV.is_contiguous()
