"""Expert activation in Triton, times the routing probability of the row, one pass in each direction.

Everything is computed in float32 and rounded once. The gradient of a row's probability is summed within one program, in
a deterministic order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_COLUMNS = 1024
"""Columns of a row that a program loads at a time."""


@triton.jit
def activation_and_slopes(g, u, alpha, limit, IS_CLAMPED: tl.constexpr):
    """Return (hidden value, its derivative in g, its derivative in u)."""
    if IS_CLAMPED:
        clamped = tl.minimum(g, limit)
        factor = tl.minimum(tl.maximum(u, -limit), limit) + 1.0
        share = tl.sigmoid(alpha * clamped)
        swish = clamped * share
        slope_g = factor * share * (1.0 + alpha * clamped * (1.0 - share))
        slope_g = tl.where(g > limit, 0.0, slope_g)
        slope_u = tl.where(tl.abs(u) > limit, 0.0, swish)
        hidden = factor * swish
    else:
        share = tl.sigmoid(g)
        slope_u = g * share
        slope_g = u * share * (1.0 + g * (1.0 - share))
        hidden = slope_u * u
    return hidden, slope_g, slope_u


@triton.jit
def _forward_kernel(
    g, u, probs, hidden, num_columns, alpha, limit,
    IS_CLAMPED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    index = row * num_columns + column
    g_value = tl.load(g + index, mask=is_column, other=0.0).to(tl.float32)
    u_value = tl.load(u + index, mask=is_column, other=0.0).to(tl.float32)
    value, _, _ = activation_and_slopes(g_value, u_value, alpha, limit, IS_CLAMPED)
    if HAS_PROBS:
        value *= tl.load(probs + row).to(tl.float32)
    tl.store(hidden + index, value.to(hidden.dtype.element_ty), mask=is_column)


@triton.jit
def _backward_kernel(
    grad, g, u, probs, hidden, grad_g, grad_u, grad_probs, num_columns, alpha, limit,
    IS_CLAMPED: tl.constexpr, HAS_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    prob = 1.0
    if HAS_PROBS:
        prob = tl.load(probs + row).to(tl.float32)
    dots = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < num_columns
        index = row * num_columns + column
        g_value = tl.load(g + index, mask=is_column, other=0.0).to(tl.float32)
        u_value = tl.load(u + index, mask=is_column, other=0.0).to(tl.float32)
        grad_value = tl.load(grad + index, mask=is_column, other=0.0).to(tl.float32)
        value, slope_g, slope_u = activation_and_slopes(g_value, u_value, alpha, limit, IS_CLAMPED)
        dots += tl.where(is_column, grad_value * value, 0.0)
        grad_value *= prob
        tl.store(hidden + index, (value * prob).to(hidden.dtype.element_ty), mask=is_column)
        tl.store(grad_g + index, (grad_value * slope_g).to(grad_g.dtype.element_ty), mask=is_column)
        tl.store(grad_u + index, (grad_value * slope_u).to(grad_u.dtype.element_ty), mask=is_column)
    if HAS_PROBS:
        tl.store(grad_probs + row, tl.sum(dots, 0).to(grad_probs.dtype.element_ty))


def activation_forward(g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None, clamp: tuple[float, float] | None) -> Tensor:
    """Compute the activation times the probabilities of the rows, [R, F].

    Args:
        g_RF: gate projection, contiguous.
        u_RF: up projection, contiguous.
        probs_R: None: 1.
        clamp: (alpha, limit) of the clamped activation. None: SwiGLU.
    """
    hidden_RF = torch.empty_like(g_RF)
    rows, columns = g_RF.shape
    if hidden_RF.numel():
        block = _block_columns(columns)
        _forward_kernel[(rows, triton.cdiv(columns, block))](
            g_RF.contiguous(), u_RF.contiguous(), g_RF if probs_R is None else probs_R.contiguous(), hidden_RF,
            columns, *(clamp or (0.0, 0.0)), IS_CLAMPED=clamp is not None, HAS_PROBS=probs_R is not None,
            BLOCK=block,
        )  # fmt: skip
    return hidden_RF


def activation_backward(
    grad_RF: Tensor, g_RF: Tensor, u_RF: Tensor, probs_R: Tensor | None, clamp: tuple[float, float] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (scaled hidden values, gradients of g, of u and of the probabilities [R]). See `activation_forward`."""
    hidden_RF, grad_g, grad_u = (torch.empty_like(g_RF) for _ in range(3))
    rows, columns = g_RF.shape
    grad_probs = None if probs_R is None else torch.empty_like(probs_R)
    if rows:
        _backward_kernel[(rows,)](
            grad_RF.contiguous(), g_RF.contiguous(), u_RF.contiguous(),
            g_RF if probs_R is None else probs_R.contiguous(), hidden_RF, grad_g, grad_u,
            g_RF if grad_probs is None else grad_probs, columns, *(clamp or (0.0, 0.0)),
            IS_CLAMPED=clamp is not None, HAS_PROBS=probs_R is not None, BLOCK=_block_columns(columns),
        )  # fmt: skip
    return hidden_RF, grad_g, grad_u, grad_probs


def _block_columns(columns: int) -> int:
    return min(triton.next_power_of_2(max(columns, 1)), MAX_BLOCK_COLUMNS)
