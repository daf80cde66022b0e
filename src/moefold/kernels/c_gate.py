"""SwiGLU's gate between the products of experts on a CPU, in C, in one pass; its plain twin is `moe.gate.SiluGate`."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.c_library import CompilerError, c_library
from moefold.moe.gate import SiluGate

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PROBE = 1027
"""Values that are tried before the library is trusted: no multiple of what a processor takes at a time."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the trial: what is wrong is wrong by more."""
PLAIN = SiluGate()


class CGate:
    """`moe.gate.Gate` of silu(g) * u; float32 between, also where memory has bfloat16.

    What it does not know is computed by the plain twin: autograd, other types, devices and strides.

    Raises:
        CompilerError: it cannot be built here.
    """

    def __init__(self) -> None:
        library = c_library("experts")
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for kind, tensors in (("silu", 3), ("silu_backward", 6)):
            for dtype, name in TYPES.items():
                function = self._functions[kind, dtype] = getattr(library, f"{kind}_{name}")
                function.argtypes = [*[ctypes.c_void_p] * tensors, ctypes.c_int64, ctypes.c_int]
                function.restype = None
        self._try_out()

    def forward(self, g: Tensor, u: Tensor, room: Tensor | None = None) -> Tensor:
        """See `Gate`."""
        is_differentiated = torch.is_grad_enabled() and (g.requires_grad or u.requires_grad)
        if is_differentiated or not _knows(g, u, *(() if room is None else (room,))):
            return PLAIN.forward(g, u, room)
        hidden = torch.empty_like(g) if room is None else room
        self._call("silu", g, u, hidden)
        return hidden

    def backward(
        self, grad: Tensor, g: Tensor, u: Tensor, rooms: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Gate`."""
        if not _knows(grad, g, u, *(rooms or ())):
            return PLAIN.backward(grad, g, u, rooms)
        hidden, grad_u = rooms or (torch.empty_like(grad), torch.empty_like(grad))
        self._call("silu_backward", grad, g, u, hidden, grad, grad_u)
        return hidden, grad, grad_u

    def _call(self, kind: str, *tensors: Tensor) -> None:
        first = tensors[0]
        pointers = [tensor.data_ptr() for tensor in tensors]
        self._functions[kind, first.dtype](*pointers, first.numel(), torch.get_num_threads())

    def _try_out(self) -> None:
        """Compare with the plain twin, so that a compiler that errs is found out before a run is.

        Raises:
            CompilerError: it differs.
        """
        probes = [torch.linspace(-low, 9.0, PROBE) for low in (7.0, 100.0, 5.0)]
        for dtype, error in TOLERANCES.items():
            grad, g, u = (probe.to(dtype) for probe in probes)
            found = [self.forward(g, u), *self.backward(grad.clone(), g, u)]
            right = PLAIN.backward(grad.double(), g.double(), u.double())
            for a, e in zip(found, (right[0], *right), strict=True):
                if not torch.allclose(a.double(), e, rtol=error, atol=error):
                    raise CompilerError(f"what the compiler built is wrong in {TYPES[dtype]}")


def _knows(*tensors: Tensor) -> bool:
    first = tensors[0]
    return first.dtype in TYPES and all(
        t.is_cpu and t.dtype == first.dtype and t.shape == first.shape and t.is_contiguous() for t in tensors
    )
