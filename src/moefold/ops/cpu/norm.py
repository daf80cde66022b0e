"""RMSNorm on a CPU, in C, one pass over memory each way; a `NormKernel` (ops/norm.py).

Its plain twin is `cpu_norm.PlainNorm`. No bit depends on the number of threads.
"""

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from moefold.ops.cpu.build import CompilerError, load_library
from moefold.ops.norm import TORCH_RMS_NORM, NormKernel

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial, by the types that it knows: what is wrong is wrong by more."""
SELF_TEST_SHAPE = (131, 37)
"""Rows of the trial and their size: several blocks, and no multiple of what a processor takes at a time."""


class CNorm:
    """RMSNorm of rows of float32 or bfloat16; float32 between.

    What it does not know is computed by the plain twin: other types and devices, and rows that are not apart by one
    number or whose numbers are not side by side.

    Raises:
        CompilerError: it cannot be built here.
    """

    def __init__(self) -> None:
        library = load_library("norm")
        pointer = ctypes.c_void_p
        size = ctypes.c_int64
        number = ctypes.c_int
        self._num_blocks = library.norm_blocks
        self._num_blocks.argtypes = [size]
        self._num_blocks.restype = size
        self._forward = library.norm_forward
        self._backward = library.norm_backward
        self._forward.argtypes = [pointer, size, *[pointer] * 3, size, size, ctypes.c_float, number, number]
        self._backward.argtypes = [pointer, size, pointer, size, *[pointer] * 5, size, size, number, number]
        self._forward.restype = self._backward.restype = None
        self._self_test()

    def forward(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        apart = _row_stride(x)
        if apart is None or not _supports(x, weight):
            return TORCH_RMS_NORM.forward(x, weight, eps)
        size = x.shape[-1]
        rows = x.numel() // size
        y = x.new_empty(x.shape)
        scale_N1 = x.new_empty((rows, 1), dtype=torch.float32)
        given = x.data_ptr(), apart, weight.data_ptr(), y.data_ptr(), scale_N1.data_ptr()
        self._forward(*given, rows, size, eps, x.dtype == torch.bfloat16, torch.get_num_threads())
        return y, scale_N1

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale_N1: Tensor) -> tuple[Tensor, Tensor]:
        """See `NormKernel`."""
        apart = _row_stride(x)
        grad_apart = _row_stride(grad)
        if apart is None or grad_apart is None or not _supports(x, weight, grad):
            return TORCH_RMS_NORM.backward(grad, x, weight, scale_N1)
        rows = len(scale_N1)
        size = x.shape[-1]
        grad_x = x.new_empty(x.shape)
        grad_weight = weight.new_empty(weight.shape)
        sums = x.new_empty((self._num_blocks(rows), size), dtype=torch.float32)
        given = grad.data_ptr(), grad_apart, x.data_ptr(), apart, weight.data_ptr(), scale_N1.data_ptr()
        results = grad_x.data_ptr(), grad_weight.data_ptr(), sums.data_ptr()
        self._backward(*given, *results, rows, size, x.dtype == torch.bfloat16, torch.get_num_threads())
        return grad_x, grad_weight

    def _self_test(self) -> None:
        """Compare with the plain twin, so that a compiler that errs is found out before a run is.

        Raises:
            CompilerError: it differs.
        """
        rows, size = SELF_TEST_SHAPE
        x, grad = (torch.linspace(low, 9, rows * size).sin().view(rows, size) for low in (-500, 300))
        weight = torch.linspace(-1, 2, size)
        for dtype, error in TOLERANCES.items():
            given = [t.to(dtype) for t in (grad, x, weight)]
            found = _forward_backward(self, *given)
            right = _forward_backward(TORCH_RMS_NORM, *(t.double() for t in given))
            for a, e in zip(found, right, strict=True):
                if not torch.allclose(a.double(), e, rtol=error, atol=error):
                    raise CompilerError(f"what the compiler built of norms is wrong in {dtype}")


def _forward_backward(kernel: NormKernel, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y, scale_N1 = kernel.forward(x, weight, 1e-3)
    return y, scale_N1, *kernel.backward(grad, x, weight, scale_N1)


def _supports(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    return (
        x.dtype in TOLERANCES
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and weight.is_contiguous()
        and all(t.is_cpu and t.dtype == x.dtype for t in (x, weight, *others))
    )


def _row_stride(x: Tensor) -> int | None:
    """How far rows of [..., H] are apart in memory; None where they are not all alike or not whole."""
    dims = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    rows = [(count, stride) for count, stride in dims if count != 1]
    is_whole = x.stride(-1) == 1 or x.shape[-1] == 1
    if not is_whole or any(outer != count * inner for (_, outer), (count, inner) in pairwise(rows)):
        return None
    return rows[-1][1] if rows else x.shape[-1]
