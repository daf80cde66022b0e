"""Attention blocks by cuDNN, which has other kernels for Hopper and Blackwell than `CudaFlash`."""

import torch
from torch import Tensor

from moefold.comm.private_torch import cudnn_attention, cudnn_attention_backward
from moefold.ops.block_attention import CudaFlash, Mask, disagreement, heads_first, is_causal, random_tensors

MAX_HEAD_SIZE = 128
"""Largest head dim of cuDNN's backward pass on every GPU that has its kernels (torch: sdp_utils.cpp)."""


class CudnnAttention:
    """cuDNN attention with log-sum-exp, of all keys or causal, for bfloat16 and float16.

    cuDNN builds a plan for each new shape, so it suits blocks whose shapes recur in every step.
    """

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel supports these tensors, [S, B, heads, D]."""
        return CudaFlash.supports(q) and q.shape[-1] == v.shape[-1] <= MAX_HEAD_SIZE

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        assert isinstance(block_mask, str), "cuDNN reads no mask here"
        tensors = (heads_first(x) for x in (q, k, v))
        out, lse, *_ = cudnn_attention()(*tensors, None, True, 0.0, is_causal(block_mask), False)
        return out.permute(2, 0, 1, 3), lse.flatten(2).permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        tensors = (heads_first(x) for x in (grad_out, q, k, v, out))
        # The RNG state is read only with dropout.
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        lse = lse.permute(1, 2, 0).contiguous().unsqueeze(-1)
        limits = (None, None, None, q.shape[0], k.shape[0])
        dq, dk, dv = cudnn_attention_backward()(*tensors, lse, seed, seed, *limits, 0.0, is_causal(block_mask))
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def probe_cudnn_attention(device: torch.device) -> str:
    """Compare cuDNN with the definition on small tensors of a GPU. Return the reason why it cannot be used, or ""."""
    masks: tuple[tuple[Mask, int], ...] = (("all", 256), ("causal", 128))
    for mask, num_keys in masks:
        shapes = [(128, 2, 4, 64)] * 2 + [(num_keys, 2, 2, 64)] * 2
        fault = disagreement(CudnnAttention(), random_tensors(shapes, device, torch.bfloat16), mask, mask)
        if fault:
            return f"cuDNN attention {fault} ({mask})"
    return ""
