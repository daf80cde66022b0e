"""Short causal convolution of each channel on a CPU in C, forward and backward, a a `ConvolutionKernel`.

Its reference is `ops.linear_attention.causal_convolution`. Tensors are float32 or bfloat16, computation is float32.
Results are bitwise independent of the number of threads.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.ops.cpu.build import NUMBER, POINTER, check_results, declare, load_library, pointer_fields, size_fields
from moefold.ops.linear_attention import causal_convolution

MAX_TAPS = 8
"""Maximum number of taps, as in `convolution.c`."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Tolerances of the self-test, by supported dtype. A miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (13, 2, 37, 4)
"""Tokens, samples, channels and taps of the self-test."""


class _ConvolutionStruct(ctypes.Structure):
    """C struct `convolution_inputs`."""

    _fields_ = (
        *pointer_fields("x", "previous", "weight", "num_previous"),
        *size_fields("tokens", "samples", "channels", "taps", "is_bfloat16", "has_silu"),
    )


class CConvolution:
    """Causal convolution of float32 or bfloat16 tokens, computed in float32."""

    def __init__(self) -> None:
        library = load_library("convolution")
        self._forward = declare(library.convolution_forward, _ConvolutionStruct, POINTER, NUMBER)
        self._backward = declare(library.convolution_backward, _ConvolutionStruct, *[POINTER] * 4, NUMBER)
        self._self_test()

    def supports(self, x_SBC: Tensor, weight_CK: Tensor) -> bool:
        """See `ConvolutionKernel`."""
        return (
            all(t.is_cpu and t.dtype == x_SBC.dtype for t in (x_SBC, weight_CK))
            and x_SBC.dtype in TOLERANCES
            and weight_CK.shape[1] <= MAX_TAPS
            and x_SBC.numel() > 0
        )

    def __call__(
        self, x_SBC: Tensor, weight_CK: Tensor, previous_KBC: Tensor, num_previous_SB: Tensor, *, has_silu: bool
    ) -> Tensor:
        """See `ConvolutionKernel`."""
        return _Convolution.apply(self, has_silu, x_SBC, weight_CK, previous_KBC, num_previous_SB)

    def forward(self, inputs: tuple[Tensor, ...], *, has_silu: bool) -> Tensor:
        """Return the output. Inputs are x, weight, previous and num_previous, contiguous."""
        out = torch.empty_like(inputs[0])
        self._forward(_to_struct(inputs, has_silu), out.data_ptr(), torch.get_num_threads())
        return out

    def backward(self, grad: Tensor, inputs: tuple[Tensor, ...], *, has_silu: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, weight and previous."""
        x, weight, previous, _ = inputs
        grad_x = torch.empty_like(x)
        grad_previous = torch.empty_like(previous)
        grad_weight_BKC = x.new_empty(x.shape[1], weight.shape[1], weight.shape[0], dtype=torch.float32)
        pointers = (t.data_ptr() for t in (grad, grad_x, grad_previous, grad_weight_BKC))
        self._backward(_to_struct(inputs, has_silu), *pointers, torch.get_num_threads())
        return grad_x, grad_weight_BKC.sum(0).flip(0).t().to(weight.dtype), grad_previous

    def _self_test(self) -> None:
        """Compare with the reference."""
        tokens, samples, channels, taps = SELF_TEST_SHAPE
        shapes = ((tokens, samples, channels), (channels, taps), (taps - 1, samples, channels))
        tensors = [
            torch.linspace(start, 2, torch.Size(shape).numel()).sin().view(shape)
            for start, shape in zip((-300, 40, -90), shapes, strict=True)
        ]
        num_previous_SB = torch.arange(tokens).unsqueeze(1) % torch.tensor([5, 20])
        for dtype, error in TOLERANCES.items():
            narrow = [x.to(dtype) for x in tensors]
            wide = [x.double() for x in narrow]
            for activation in (None, F.silu):
                actual = _forward_backward(narrow, num_previous_SB, activation, self)
                expected = _forward_backward(wide, num_previous_SB, activation, None)
                check_results("convolution", dtype, actual, expected, error)


class _Convolution(torch.autograd.Function):
    """Function of x, weight, previous and num_previous that returns the convolution."""

    @staticmethod
    def forward(ctx: Any, kernel: CConvolution, has_silu: bool, *tensors: Tensor) -> Tensor:
        inputs = tuple(x.contiguous() for x in tensors)
        ctx.kernel = kernel
        ctx.has_silu = has_silu
        ctx.save_for_backward(*inputs)
        return kernel.forward(inputs, has_silu=has_silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.kernel.backward(grad.contiguous(), ctx.saved_tensors, has_silu=ctx.has_silu)
        return (None, None, *grads, None)


def _forward_backward(
    tensors: list[Tensor], num_previous_SB: Tensor, activation: Any, kernel: CConvolution | None
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    x, weight, previous = leaves
    out = causal_convolution(x, weight, previous, num_previous_SB, activation, kernel)
    weights = torch.linspace(-7, 3, out.numel()).sin().view(out.shape).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, weights)


def _to_struct(inputs: tuple[Tensor, ...], has_silu: bool) -> _ConvolutionStruct:
    x, weight, _, _ = inputs
    shape = (*x.shape, weight.shape[1], x.dtype == torch.bfloat16, has_silu)
    return _ConvolutionStruct(*(t.data_ptr() for t in (x, inputs[2], weight, inputs[3])), *shape)
