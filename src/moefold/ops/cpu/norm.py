"""RMSNorm on a CPU in C, one pass over memory in each direction, a a `NormKernel` (ops/norm.py).

Its reference is `ops.norm.TorchRMSNorm`. Results are bitwise independent of the number of threads.
"""

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, check_results, declare, load_library
from moefold.ops.norm import TORCH_RMS_NORM, NormKernel

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Tolerances of the self-test, by supported dtype. A miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (131, 37)
"""Number and size of the self-test's rows: several blocks, and not multiples of vector widths."""


class CNorm:
    """RMSNorm of float32 or bfloat16 rows, computed in float32.

    Unsupported tensors fall back to the reference: other dtypes and devices, and rows of non-uniform stride or with
    non-contiguous elements.
    """

    def __init__(self) -> None:
        library = load_library("norm")
        self._num_blocks = declare(library.norm_num_blocks, SIZE, result=SIZE)
        ends = (SIZE, SIZE, ctypes.c_float, NUMBER, NUMBER)
        self._forward = declare(library.norm_forward, POINTER, SIZE, *[POINTER] * 3, *ends)
        rows = (POINTER, SIZE, POINTER, SIZE, *[POINTER] * 5)
        self._backward = declare(library.norm_backward, *rows, SIZE, SIZE, NUMBER, NUMBER)
        self._self_test()

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        row_stride = _row_stride(x)
        if row_stride is None or not _supports(x, weight):
            return TORCH_RMS_NORM.forward(x, weight, eps)
        size = x.shape[-1]
        rows = x.numel() // size
        y = x.new_empty(x.shape)
        scale_N1 = x.new_empty((rows, 1), dtype=torch.float32)
        args = x.data_ptr(), row_stride, weight.data_ptr(), y.data_ptr(), scale_N1.data_ptr()
        self._forward(*args, rows, size, eps, x.dtype == torch.bfloat16, torch.get_num_threads())
        return y, scale_N1

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale_N1: Tensor) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        row_stride = _row_stride(x)
        grad_row_stride = _row_stride(grad)
        if row_stride is None or grad_row_stride is None or not _supports(x, weight, grad):
            return TORCH_RMS_NORM.backward(grad, x, weight, scale_N1)
        rows = len(scale_N1)
        size = x.shape[-1]
        grad_x = x.new_empty(x.shape)
        grad_weight = weight.new_empty(weight.shape)
        sums = x.new_empty((self._num_blocks(rows), size), dtype=torch.float32)
        args = grad.data_ptr(), grad_row_stride, x.data_ptr(), row_stride, weight.data_ptr(), scale_N1.data_ptr()
        results = grad_x.data_ptr(), grad_weight.data_ptr(), sums.data_ptr()
        self._backward(*args, *results, rows, size, x.dtype == torch.bfloat16, torch.get_num_threads())
        return grad_x, grad_weight

    def _self_test(self) -> None:
        """Compare with the reference."""
        rows, size = SELF_TEST_SHAPE
        x, grad = (torch.linspace(low, 9, rows * size).sin().view(rows, size) for low in (-500, 300))
        weight = torch.linspace(-1, 2, size)
        for dtype, error in TOLERANCES.items():
            inputs = [t.to(dtype) for t in (grad, x, weight)]
            actual = _forward_backward(self, *inputs)
            expected = _forward_backward(TORCH_RMS_NORM, *(t.double() for t in inputs))
            check_results("RMSNorm kernel", dtype, actual, expected, error)


def _forward_backward(kernel: NormKernel, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y, scale_N1 = kernel.forward(x, weight, 1e-3)
    return y, scale_N1, *kernel.backward(grad, x, weight, scale_N1)


def _supports(x: Tensor, weight: Tensor, *more: Tensor) -> bool:
    return (
        x.dtype in TOLERANCES
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and weight.is_contiguous()
        and all(t.is_cpu and t.dtype == x.dtype for t in (x, weight, *more))
    )


def _row_stride(x: Tensor) -> int | None:
    """Return the stride of the rows of [..., H], or None if it is not uniform or elements are not contiguous."""
    dims = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    rows = [(count, stride) for count, stride in dims if count != 1]
    is_contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    if not is_contiguous or any(outer != count * inner for (_, outer), (count, inner) in pairwise(rows)):
        return None
    return rows[-1][1] if rows else x.shape[-1]
