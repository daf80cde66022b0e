"""Attention blocks by cuDNN, which has other kernels for Hopper and Blackwell than `CudaFlash`."""

from typing import Literal

import torch
from torch import Tensor

from moefold.comm.private_torch import cudnn_attention, cudnn_attention_backward
from moefold.ops.block_attention import PROBE_LSE_TOLERANCE, PROBE_TOLERANCE, CudaFlash, Mask, MathBlockAttention

MAX_HEAD_SIZE = 128
"""Largest head dim of cuDNN's backward pass on every GPU that has its kernels (torch: sdp_utils.cpp)."""


class CudnnAttention:
    """cuDNN attention with log-sum-exp, of all keys or causal; bfloat16 and float16.

    cuDNN builds a plan for each new shape, so it suits blocks whose shapes recur in every step.
    """

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel supports these tensors, [S, B, heads, D]."""
        return CudaFlash.supports(q) and q.shape[-1] == v.shape[-1] <= MAX_HEAD_SIZE

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        tensors = (_heads_first(x) for x in (q, k, v))
        out, lse, *_ = cudnn_attention()(*tensors, None, True, 0.0, _is_causal(block_mask), False)
        return out.permute(2, 0, 1, 3), lse.flatten(2).permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        tensors = (_heads_first(x) for x in (grad_out, q, k, v, out))
        # The RNG state is read only with dropout.
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        lse = lse.permute(1, 2, 0).contiguous().unsqueeze(-1)
        limits = (None, None, None, q.shape[0], k.shape[0])
        dq, dk, dv = cudnn_attention_backward()(*tensors, lse, seed, seed, *limits, 0.0, _is_causal(block_mask))
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def probe_cudnn_attention(device: torch.device) -> str:
    """Compare cuDNN with the definition on small tensors of the device; return the reason why it cannot be used, or "".

    Args:
        device: a GPU.
    """
    generator = torch.Generator().manual_seed(0)
    masks: tuple[Literal["all"], Literal["causal"]] = ("all", "causal")
    for block_mask in masks:
        num_keys = 256 if block_mask == "all" else 128
        shapes = ((128, 2, 4, 64), (128, 2, 4, 64), (num_keys, 2, 2, 64), (num_keys, 2, 2, 64))
        inputs = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
        exact = _passes(MathBlockAttention(), [x.double() for x in inputs], block_mask)
        try:
            results = _passes(CudnnAttention(), inputs, block_mask)
        except RuntimeError as error:
            return f"cuDNN attention raises {str(error).splitlines()[0]!r}"
        errors = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(results, exact, strict=True)]
        limits = [PROBE_TOLERANCE, PROBE_LSE_TOLERANCE, *[PROBE_TOLERANCE] * 3]
        if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            return f"cuDNN attention ({block_mask}) differs from the definition by {max(errors):.2g}"
    return ""


def _passes(kernel: CudnnAttention | MathBlockAttention, inputs: list[Tensor], block_mask: Mask) -> list[Tensor]:
    grad_out, q, k, v = inputs
    out, lse = kernel.forward(q, k, v, block_mask)
    return [out, lse, *kernel.backward(grad_out, q, k, v, out, lse, block_mask)]


def _is_causal(block_mask: Mask) -> bool:
    assert isinstance(block_mask, str), "cuDNN reads no mask here"
    return block_mask == "causal"


def _heads_first(x_SBAD: Tensor) -> Tensor:
    return x_SBAD.permute(1, 2, 0, 3)
