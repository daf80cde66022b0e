"""Attention of the libraries on a GPU, the fastest for each shape: cuDNN, flash, or SDPA's own preference."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moefold.ops.autotune import Autotuner, TuningKey
from moefold.ops.block_attention import BlockKernel, CausalKernel, CudaFlash, Mask, causal_sdpa, is_causal
from moefold.ops.cudnn_attention import MAX_HEAD_SIZE

ResultT = TypeVar("ResultT")
MLA_HEAD_SIZES = (192, 128)
"""Unequal head dims of queries and values for which cuDNN has kernels."""


def measured_causal_sdpa(tuner: Autotuner, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Compute `causal_sdpa` by the backend whose forward and backward pass are the fastest together.

    Args:
        q: queries, [S, B, A, D].
        k: keys, [S, B, G, D].
        v: values, [S, B, G, Dv].
        scale: factor of the scores. None means 1 / sqrt(D).
    """
    names = sdpa_backends(q, v)
    timed = {name: partial(_both_passes, backend, q, k, v, scale) for name, backend in names.items()}
    shape = q.dtype, q.shape[1].bit_length(), q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    fastest = names[tuner.choose(TuningKey("causal attention", len(q), shape), timed)]
    return _by_backend(fastest, q, k, v, scale)


def sdpa_backends(q: Tensor, v: Tensor) -> dict[str, SDPBackend | None]:
    """Return the backends worth measuring for these heads, by name. None: SDPA's own preference, the default."""
    sizes = q.shape[3], v.shape[3]
    names: dict[str, SDPBackend | None] = {"SDPA's preference": None}
    if CudaFlash.supports(q):
        if max(sizes) <= MAX_HEAD_SIZE or sizes == MLA_HEAD_SIZES:
            names["cuDNN"] = SDPBackend.CUDNN_ATTENTION
        if sizes[0] == sizes[1]:
            names["flash"] = SDPBackend.FLASH_ATTENTION
    return names


def _by_backend(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    if backend is None:
        return causal_sdpa(q, k, v, scale)
    with sdpa_kernel(backend):
        return causal_sdpa(q, k, v, scale)


def _both_passes(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    """Compute both passes on the values of these tensors, without their graph and the hooks on saved tensors."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = _by_backend(backend, q, k, v, scale)
        torch.autograd.grad(out, (q, k, v), out.detach())


class MeasuredBlockAttention:
    """Attention with log-sum-exp by the faster of two interchangeable kernels in each pass, by default the first."""

    def __init__(self, tuner: Autotuner, name: str, kernel: CausalKernel) -> None:
        self._tuner = tuner
        self._kernel = kernel
        self._kernels: dict[str, BlockKernel] = {name: kernel, "flash": CudaFlash()}

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether both kernels support these tensors, [S, B, heads, D]."""
        return self._kernel.supports(q, k, v) and CudaFlash.supports(q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        passes = {name: partial(kernel.forward, q, k, v, block_mask) for name, kernel in self._kernels.items()}
        return self._fastest("attention block", passes, q, k, block_mask)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        inputs = grad_out, q, k, v, out, lse, block_mask
        passes = {name: partial(kernel.backward, *inputs) for name, kernel in self._kernels.items()}
        return self._fastest("attention block backward", passes, q, k, block_mask)

    def _fastest(
        self, op: str, passes: Mapping[str, Callable[[], ResultT]], q: Tensor, k: Tensor, block_mask: Mask
    ) -> ResultT:
        sizes = len(k).bit_length(), q.shape[1].bit_length(), q.shape[2], k.shape[2], q.shape[3]
        shape = q.dtype, is_causal(block_mask), *sizes
        return passes[self._tuner.choose(TuningKey(op, len(q), shape), passes)]()
