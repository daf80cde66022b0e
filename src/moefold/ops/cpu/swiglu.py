"""SwiGLU on a CPU in C, in one pass. Its reference is `ops.swiglu.SwiGLUActivation`."""

from typing import Any

import torch
from torch import Tensor

from moefold.ops.cpu.build import NUMBER, POINTER, SIZE, check_results, declare, load_library
from moefold.ops.swiglu import SWIGLU

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SELF_TEST_SIZE = 1027
"""Values of the self-test: not a multiple of vector widths."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Tolerances of the self-test. A miscompiled kernel differs by more."""


class CSwiGLU:
    """`ExpertActivation` silu(g) * u, computed in float32, for float32 or bfloat16 tensors.

    Unsupported calls fall back to the reference: autograd, other dtypes, devices and strides.
    """

    def __init__(self) -> None:
        library = load_library("swiglu")
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for kind, tensors in (("swiglu", 3), ("swiglu_backward", 6)):
            for dtype, name in DTYPE_NAMES.items():
                function = getattr(library, f"{kind}_{name}")
                self._functions[kind, dtype] = declare(function, *[POINTER] * tensors, SIZE, NUMBER)
        self._self_test()

    def forward(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """See `ExpertActivation`."""
        is_differentiated = torch.is_grad_enabled() and (g.requires_grad or u.requires_grad)
        if is_differentiated or not _supports(g, u, *(() if out is None else (out,))):
            return SWIGLU.forward(g, u, out)
        hidden = torch.empty_like(g) if out is None else out
        self._call("swiglu", g, u, hidden)
        return hidden

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, outs: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertActivation`."""
        if not _supports(grad, g, u, *(outs or ())):
            return SWIGLU.backward(grad, g, u, outs)
        hidden, grad_u = outs or (torch.empty_like(grad), torch.empty_like(grad))
        self._call("swiglu_backward", grad, g, u, hidden, grad, grad_u)
        return hidden, grad, grad_u

    def _call(self, kind: str, *tensors: Tensor) -> None:
        first = tensors[0]
        pointers = [tensor.data_ptr() for tensor in tensors]
        self._functions[kind, first.dtype](*pointers, first.numel(), torch.get_num_threads())

    def _self_test(self) -> None:
        """Compare with the reference."""
        probes = [torch.linspace(-low, 9.0, SELF_TEST_SIZE) for low in (7.0, 100.0, 5.0)]
        for dtype, error in TOLERANCES.items():
            grad, g, u = (probe.to(dtype) for probe in probes)
            actual = [self.forward(g, u), *self.backward(grad.clone(), g, u)]
            expected = SWIGLU.backward(grad.double(), g.double(), u.double())
            check_results("SwiGLU kernel", dtype, actual, (expected[0], *expected), error)


def _supports(*tensors: Tensor) -> bool:
    first = tensors[0]
    return first.dtype in DTYPE_NAMES and all(
        t.is_cpu and t.dtype == first.dtype and t.shape == first.shape and t.is_contiguous() for t in tensors
    )
