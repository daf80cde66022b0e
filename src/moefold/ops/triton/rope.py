"""Rotary position embedding (RoPE) of all heads of a token in one pass, in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

HEADS_PER_PROGRAM = 8
"""Heads of a token that a program rotates."""


@triton.jit
def _rope_kernel(
    x, cos, sin, y, num_batch, num_heads, half, width,
    stride_xs, stride_xb, stride_xn, stride_cs, stride_cb,
    IS_INTERLEAVED: tl.constexpr, IS_BACKWARD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotate pairs, forward or backward. The dims after the pairs are copied, and y is contiguous."""
    s = (tl.program_id(0) // num_batch).to(tl.int64)
    b = (tl.program_id(0) % num_batch).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_P)
    is_head = (head < num_heads)[:, None]
    is_pair = is_head & (pair < half)[None, :]
    angle = s * stride_cs + b * stride_cb + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    d = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    row_x = x + s * stride_xs + b * stride_xb + head[:, None] * stride_xn
    row_y = y + (tl.program_id(0).to(tl.int64) * num_heads + head[:, None]) * width
    # Interleaved pairs are neighbours in x and half the dims apart in y. Other pairs are half the dims apart in both.
    d = -d if IS_BACKWARD else d
    if IS_INTERLEAVED and not IS_BACKWARD:
        # Neighbours are loaded together, as consecutive numbers.
        column = tl.arange(0, 2 * BLOCK_P)
        pairs = tl.load(row_x + column[None, :], mask=is_head & (column < 2 * half)[None, :], other=0.0)
        first, second = tl.split(tl.reshape(pairs.to(tl.float32), (HEADS, BLOCK_P, 2)))
    else:
        first = tl.load(row_x + pair[None, :], mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(row_x + pair[None, :] + half, mask=is_pair, other=0.0).to(tl.float32)
    turned_first = (first * c - second * d).to(y.dtype.element_ty)
    turned_second = (second * c + first * d).to(y.dtype.element_ty)
    if IS_INTERLEAVED and IS_BACKWARD:
        column = tl.arange(0, 2 * BLOCK_P)
        pairs = tl.reshape(tl.join(turned_first, turned_second), (HEADS, 2 * BLOCK_P))
        tl.store(row_y + column[None, :], pairs, mask=is_head & (column < 2 * half)[None, :])
    else:
        tl.store(row_y + pair[None, :], turned_first, mask=is_pair)
        tl.store(row_y + pair[None, :] + half, turned_second, mask=is_pair)
    if BLOCK_R > 0:
        tail = half * 2 + tl.arange(0, BLOCK_R)
        is_rest = is_head & (tail < width)[None, :]
        tl.store(row_y + tail[None, :], tl.load(row_x + tail[None, :], mask=is_rest), mask=is_rest)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotate the first dims of each head. See `moefold.ops.rope.Rope`.

    Args:
        x: [S, B, heads, D].
        cos: [S, 1 or B, 1, rotated dims], with equal halves.
        sin: same shape.
        is_interleaved: pairs are neighbouring dims. The output has all first elements before all second elements.
    """
    return _TritonRopeFunction.apply(x, cos, sin, is_interleaved)


class _TritonRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return _launch_rope(x, cos, sin, is_interleaved, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch_rope(grad, cos, sin, ctx.is_interleaved, is_backward=True), None, None, None


def _launch_rope(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, *, is_backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    seq_len, num_batch, num_heads, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1] // 2
    tail = width - cos.shape[-1]
    if y.numel():
        _rope_kernel[(seq_len * num_batch, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            x, cos, sin, y, num_batch, num_heads, half, width, *x.stride()[:3], cos.stride(0),
            0 if cos.shape[1] == 1 else cos.stride(1), IS_INTERLEAVED=is_interleaved, IS_BACKWARD=is_backward,
            HEADS=HEADS_PER_PROGRAM,
            BLOCK_P=triton.next_power_of_2(half), BLOCK_R=triton.next_power_of_2(tail) if tail else 0,
        )  # fmt: skip
    return y
