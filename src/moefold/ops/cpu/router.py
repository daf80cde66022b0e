"""Softmax of routers on a CPU in C, with the same bits as in `decode.c`, a a `SoftmaxKernel`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, check_results, declare, load_library

SELF_TEST_WIDTHS = (3, 37)
"""Widths of the rows of the self-test: less than a vector, and not a multiple of a vector."""
TOLERANCE = 1e-6


class CSoftmax:
    """Softmax over the last dim of float32 tensors, with its gradient. Other tensors take torch's softmax."""

    def __init__(self) -> None:
        self._softmax = declare(load_library("router").router_softmax, POINTER, POINTER, SIZE, SIZE, NUMBER)
        self._self_test()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the softmax over the last dim."""
        if not x.is_cpu or x.dtype != torch.float32:
            return x.softmax(-1)
        return _Softmax.apply(x, self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the softmax without autograd."""
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        if x.numel():
            self._softmax(x.data_ptr(), y.data_ptr(), x.numel() // width, width, torch.get_num_threads())
        return y

    def _self_test(self) -> None:
        """Compare with torch's softmax in float64."""
        for width in SELF_TEST_WIDTHS:
            x = torch.linspace(-30, 30, 7 * width).view(7, width)
            check_results("softmax", x.dtype, [self.forward(x)], [x.double().softmax(-1)], TOLERANCE)


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
