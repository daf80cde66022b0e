"""RoPE of half-split pairs on a CPU in C, one pass over memory in each direction, a a `RopeKernel` (ops/rope.py).

Its reference is `ops.rope.rotate_halves`, which takes four passes, and rounds twice in bfloat16.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, check_results, declare, load_library
from moefold.ops.expert_ops import unit_stride
from moefold.ops.rope import Rope, rotate_halves

MAX_PAIRS = 256
"""Maximum pairs of a head, as in `rope.c`."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Tolerances of the self-test, by supported dtype. A miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (5, 3, 2, 45, 42)
"""Tokens, samples, heads, head dim and rotated dims of the self-test: not multiples of vector widths."""


class CRope:
    """RoPE of float32 or bfloat16 heads with angles of the same dtype, computed in float32. It saves nothing of x.

    Unsupported tensors fall back to PyTorch operations: interleaved pairs, other dtypes and devices.
    """

    def __init__(self) -> None:
        tensors = (POINTER, *[SIZE] * 3, POINTER, POINTER, SIZE, SIZE, POINTER)
        function = load_library("rope").rope_apply
        self._rope = declare(function, *tensors, *[SIZE] * 5, ctypes.c_float, NUMBER, NUMBER)
        self._self_test()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
        """See `Rope.__call__`."""
        if is_interleaved or not _supports(x, cos, sin):
            return Rope(cos, sin, is_interleaved)(x)
        return _CRopeFunction.apply(x, cos, sin, self)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
        """Rotate forward (direction 1) or backward (-1), without autograd."""
        x = unit_stride(x)
        y = x.new_empty(x.shape)
        angles = cos.data_ptr(), sin.data_ptr(), cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1)
        sizes = *x.shape, cos.shape[-1] // 2
        is_bfloat16 = x.dtype == torch.bfloat16
        strided_args = x.data_ptr(), *x.stride()[:3], *angles, y.data_ptr()
        self._rope(*strided_args, *sizes, direction, is_bfloat16, torch.get_num_threads())
        return y

    def _self_test(self) -> None:
        """Compare with the reference."""
        tokens, samples, heads, size, rotated = SELF_TEST_SHAPE
        x = torch.linspace(-300, 300, tokens * samples * heads * size).sin().view(tokens, samples, heads, size)
        angles = torch.linspace(0, 3, tokens * rotated // 2).view(tokens, 1, 1, -1).repeat(1, 1, 1, 2)
        for dtype, error in TOLERANCES.items():
            heads_in, cos, sin = (t.to(dtype) for t in (x, angles.cos(), angles.sin()))
            for direction in (1, -1):
                actual = self.rotate(heads_in, cos, sin, direction)
                expected = rotate_halves(heads_in.double(), cos.double(), direction * sin.double())
                check_results("RoPE kernel", dtype, [actual], [expected], error)


class _CRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernel: CRope) -> Tensor:
        ctx.args = cos, sin, kernel
        return kernel.rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, kernel = ctx.args
        return kernel.rotate(grad, cos, sin, -1), None, None, None


def _supports(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.dtype in TOLERANCES
        and all(t.is_cpu and t.dtype == x.dtype for t in (x, cos, sin))
        and cos.stride() == sin.stride()
        and cos.stride(-1) == 1
        and cos.shape == sin.shape
        and cos.shape[-1] <= min(2 * MAX_PAIRS, x.shape[-1])
        and cos.shape[0] == x.shape[0]
        and cos.shape[1] in (1, x.shape[1])
    )
