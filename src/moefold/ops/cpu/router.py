"""Softmax of routers on a CPU in C, with the same bits as in `decode.c`; a `SoftmaxKernel`."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cpu.build import CompilerError, declare, load_library

SELF_TEST_WIDTHS = (3, 37)
"""Widths of the rows of the self-test: less than a vector, and not a multiple of a vector."""
TOLERANCE = 1e-6


class CSoftmax:
    """Softmax over the last dim of float32 tensors, with its gradient; torch's softmax for other tensors.

    Raises:
        CompilerError: the library cannot be built, or its results are wrong.
    """

    def __init__(self) -> None:
        types = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int]
        self._softmax = declare(load_library("router").router_softmax, *types)
        self._self_test()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the softmax over the last dim."""
        if not x.is_cpu or x.dtype != torch.float32:
            return x.softmax(-1)
        y: Tensor = _Softmax.apply(x, self)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Compute the softmax without autograd."""
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        if x.numel():
            self._softmax(x.data_ptr(), y.data_ptr(), x.numel() // width, width, torch.get_num_threads())
        return y

    def _self_test(self) -> None:
        """Compare with float64, to catch miscompiled kernels at start-up.

        Raises:
            CompilerError: results differ.
        """
        for width in SELF_TEST_WIDTHS:
            x = torch.linspace(-30, 30, 7 * width).view(7, width)
            if not torch.allclose(self.forward(x).double(), x.double().softmax(-1), rtol=TOLERANCE, atol=TOLERANCE):
                raise CompilerError("the compiled softmax is wrong")


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: CSoftmax) -> Tensor:
        y = kernel.forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True)), None
