"""SwiGLU's gate between the products of experts on a CPU, in C, in one pass; its plain twin is `moe.gate.SiluGate`."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from moefold.ops.cpu.build import CompilerError, load_library
from moefold.ops.swiglu import SwiGLUActivation

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SELF_TEST_SIZE = 1027
"""Values that are tried before the library is trusted: no multiple of what a processor takes at a time."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial: what is wrong is wrong by more."""
TORCH_SWIGLU = SwiGLUActivation()


class CSwiGLU:
    """`moe.gate.Gate` of silu(g) * u; float32 between, also where memory has bfloat16.

    What it does not know is computed by the plain twin: autograd, other types, devices and strides.

    Raises:
        CompilerError: it cannot be built here.
    """

    def __init__(self) -> None:
        library = load_library("swiglu")
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for kind, tensors in (("silu", 3), ("silu_backward", 6)):
            for dtype, name in DTYPE_NAMES.items():
                function = self._functions[kind, dtype] = getattr(library, f"{kind}_{name}")
                function.argtypes = [*[ctypes.c_void_p] * tensors, ctypes.c_int64, ctypes.c_int]
                function.restype = None
        self._self_test()

    def forward(self, g: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Gate`."""
        is_differentiated = torch.is_grad_enabled() and (g.requires_grad or u.requires_grad)
        if is_differentiated or not _supports(g, u, *(() if out is None else (out,))):
            return TORCH_SWIGLU.forward(g, u, out)
        hidden = torch.empty_like(g) if out is None else out
        self._call("silu", g, u, hidden)
        return hidden

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, outs: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Gate`."""
        if not _supports(grad, g, u, *(outs or ())):
            return TORCH_SWIGLU.backward(grad, g, u, outs)
        hidden, grad_u = outs or (torch.empty_like(grad), torch.empty_like(grad))
        self._call("silu_backward", grad, g, u, hidden, grad, grad_u)
        return hidden, grad, grad_u

    def _call(self, kind: str, *tensors: Tensor) -> None:
        first = tensors[0]
        pointers = [tensor.data_ptr() for tensor in tensors]
        self._functions[kind, first.dtype](*pointers, first.numel(), torch.get_num_threads())

    def _self_test(self) -> None:
        """Compare with the plain twin, so that a compiler that errs is found out before a run is.

        Raises:
            CompilerError: it differs.
        """
        probes = [torch.linspace(-low, 9.0, SELF_TEST_SIZE) for low in (7.0, 100.0, 5.0)]
        for dtype, error in TOLERANCES.items():
            grad, g, u = (probe.to(dtype) for probe in probes)
            found = [self.forward(g, u), *self.backward(grad.clone(), g, u)]
            right = TORCH_SWIGLU.backward(grad.double(), g.double(), u.double())
            for a, e in zip(found, (right[0], *right), strict=True):
                if not torch.allclose(a.double(), e, rtol=error, atol=error):
                    raise CompilerError(f"what the compiler built is wrong in {DTYPE_NAMES[dtype]}")


def _supports(*tensors: Tensor) -> bool:
    first = tensors[0]
    return first.dtype in DTYPE_NAMES and all(
        t.is_cpu and t.dtype == first.dtype and t.shape == first.shape and t.is_contiguous() for t in tensors
    )
