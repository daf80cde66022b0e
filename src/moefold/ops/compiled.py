"""Element-wise parts of a block, fused by `torch.compile` (`run.compile`): QK norm with RoPE, and SwiGLU.

Only functions of tensors are compiled, without GEMMs, parameters and communication. So quantised and split GEMMs, the
overlap of tensor parallelism, FSDP and the recomputation of other parts work as without compilation. Shapes are static.
Each combination of shapes and of gradients is compiled once for each model.
"""

import os
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from moefold.errors import install_command
from moefold.ops.rope import rotate_pairs
from moefold.ops.swiglu import swiglu

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a compiled function with the same results."""


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors with Inductor at its first call. A graph break is an error."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def _with_separate_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function: torch.compile takes at most 8 shapes of one code object, from all models together."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def inductor_unsupported_reason(device_type: str) -> str:
    """Return the reason why Inductor cannot compile for a device, or "" if it can."""
    if device_type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return "" if shutil.which(compiler) else f"there is no C++ compiler {compiler!r} (set CXX)"
    try:
        import triton  # noqa: F401
    except ImportError:
        return f"the package triton is not installed ({install_command('gpu')})"
    return ""


class CompiledQKNormRope:
    """QK norm and RoPE of queries and keys in one function, which reads and writes them once."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self._compiled = compiler(_with_separate_code(_norm_and_rotate))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        angles: tuple[Tensor, Tensor],
        *,
        is_interleaved: bool,
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate each head.

        Args:
            query: [S, B, A, D].
            key: [S, B, G, D].
            weights: weights of the norms of queries and keys, [D] each.
            eps: added to the mean of squares.
            angles: cosines and sines of `Rope`.
            is_interleaved: see `Rope`.
        """
        return self._compiled(query, key, weights, eps, angles, is_interleaved)


def _norm_and_rotate(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    angles: tuple[Tensor, Tensor],
    is_interleaved: bool,
) -> tuple[Tensor, ...]:
    return tuple(
        rotate_pairs(_rms_norm(x, weight, eps), *angles, is_interleaved=is_interleaved)
        for x, weight in zip((query, key), weights, strict=True)
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * scale * weight).to(x.dtype)


class CompiledSwiGLU:
    """`SwiGLUKernel` of dense layers and shared experts."""

    def __init__(self, compiler: Compiler = inductor) -> None:
        self._forward = compiler(_with_separate_code(_swiglu))
        self._backward = compiler(_with_separate_code(_swiglu_backward))

    def swiglu(self, g_MF: Tensor, u_MF: Tensor) -> Tensor:
        """See `SwiGLUKernel`."""
        return self._forward(g_MF, u_MF)

    def swiglu_backward(self, grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
        """See `SwiGLUKernel`."""
        return self._backward(grad_MF, g_MF, u_MF)


def _swiglu(g_MF: Tensor, u_MF: Tensor) -> Tensor:
    return swiglu(g_MF, u_MF, kernel=None)


def _swiglu_backward(grad_MF: Tensor, g_MF: Tensor, u_MF: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(g_MF)
    silu = g_MF * sigmoid
    return grad_MF * u_MF * (sigmoid + silu * (1 - sigmoid)), grad_MF * silu
