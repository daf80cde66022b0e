"""The experts: one SwiGLU (arXiv:2002.05202) each, over rows sorted by expert."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moefold.model.gemm import padded_rows, product
from moefold.model.parameter import local
from moefold.moe.dispatch.base import Loan

GROUPED_ALIGNMENT_BYTES = 16
"""grouped_mm wants every stride to be a multiple of this."""


class Experts(nn.Module):
    """w_down(silu(x w_gate) * (x w_up)) for each expert; this rank holds [E/ep, H, F/etp] of them.

    Every weight gets a gradient on every rank, zero for an expert without rows: the reduction of gradients over ranks
    counts on it.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_hidden_size: F, inner width of one expert.
    """

    def __init__(self, num_experts: int, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_up = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w_down = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))

    def forward(self, x_RH: Tensor, rows_per_expert: Sequence[int], loan: Loan | None = None) -> Tensor:
        """Apply each expert to its rows; local without a loan.

        Args:
            x_RH: rows sorted by expert, [R, H].
            rows_per_expert: one count for each expert of this rank, then for each borrowed one; they sum to R.
            loan: brings the weights of the borrowed experts.

        Returns:
            [R, H]; under etp the part of the sum over F that this rank's weights give.
        """
        assert sum(rows_per_expert) == x_RH.shape[0], (rows_per_expert, x_RH.shape)
        own = [local(w, x_RH.dtype) for w in (self.w_gate, self.w_up, self.w_down)]
        if loan is None:
            return _swiglu(x_RH, own, rows_per_expert)
        own, borrowed = loan.exchange(own)
        num_own = own[0].shape[0]
        own_rows, borrowed_rows = rows_per_expert[:num_own], rows_per_expert[num_own:]
        if not borrowed_rows:
            return _swiglu(x_RH, own, own_rows)
        # Two calls rather than one over joined weights: that would copy all of them.
        x_own, x_borrowed = x_RH.split([sum(own_rows), sum(borrowed_rows)])
        return torch.cat((_swiglu(x_own, own, own_rows), _swiglu(x_borrowed, borrowed, borrowed_rows)))


def looped_swiglu(
    x_RH: Tensor, w_gate_EHF: Tensor, w_up_EHF: Tensor, w_down_EFH: Tensor, rows_per_expert: Sequence[int]
) -> Tensor:
    """One expert after another: the reference, and the fastest way on CPU."""
    return _LoopedSwiGLU.apply(x_RH, w_gate_EHF, w_up_EHF, w_down_EFH, list(rows_per_expert))


def grouped_swiglu(
    x_RH: Tensor, w_gate_EHF: Tensor, w_up_EHF: Tensor, w_down_EFH: Tensor, rows_per_expert: Sequence[int]
) -> Tensor:
    """All experts in one kernel for each product; the twin of `looped_swiglu` for GPUs. Needs at least one row."""
    offsets_E = torch.tensor(rows_per_expert, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    offsets_E = offsets_E.to(x_RH.device, non_blocking=True)
    gate_RF = F.grouped_mm(x_RH, w_gate_EHF, offs=offsets_E)
    up_RF = F.grouped_mm(x_RH, w_up_EHF, offs=offsets_E)
    return F.grouped_mm(F.silu(gate_RF) * up_RF, w_down_EFH, offs=offsets_E)


def _swiglu(x_RH: Tensor, weights: Sequence[Tensor], rows_per_expert: Sequence[int]) -> Tensor:
    w_gate, w_up, w_down = weights
    swiglu = grouped_swiglu if _has_grouped_kernel(x_RH, w_gate, w_down) else looped_swiglu
    return swiglu(x_RH, w_gate, w_up, w_down, rows_per_expert)


def _has_grouped_kernel(x_RH: Tensor, *weights: Tensor) -> bool:
    if x_RH.device.type != "cuda" or x_RH.dtype != torch.bfloat16 or x_RH.shape[0] == 0:
        return False
    strides = {x_RH.shape[1], *(w.shape[2] for w in weights)}
    is_aligned = all(stride * x_RH.element_size() % GROUPED_ALIGNMENT_BYTES == 0 for stride in strides)
    return is_aligned and torch.cuda.get_device_capability(x_RH.device) >= (8, 0)


class _LoopedSwiGLU(torch.autograd.Function):
    """Keeps x and the two inner projections for the backward pass; everything else of an expert lives in the cache."""

    @staticmethod
    def forward(
        ctx: Any, x_RH: Tensor, w_gate_EHF: Tensor, w_up_EHF: Tensor, w_down_EFH: Tensor, rows_per_expert: list[int]
    ) -> Tensor:
        y_RH = torch.empty_like(x_RH)
        inner = []
        for e, rows in _spans(rows_per_expert):
            x = _pad(x_RH[rows])
            gate, up = product(x, w_gate_EHF[e].t()), product(x, w_up_EHF[e].t())
            y = product(F.silu(gate).mul_(up), w_down_EFH[e].t())
            y_RH[rows] = y[: rows.stop - rows.start]
            inner += [gate, up]
        ctx.save_for_backward(x_RH, w_gate_EHF, w_up_EHF, w_down_EFH, *inner)
        ctx.rows_per_expert = rows_per_expert
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x_RH, w_gate_EHF, w_up_EHF, w_down_EFH, *inner = ctx.saved_tensors
        grad_x_RH = torch.empty_like(x_RH)
        grad_gate_EHF, grad_up_EHF, grad_down_EFH = (torch.empty_like(w) for w in (w_gate_EHF, w_up_EHF, w_down_EFH))
        for e, count in enumerate(ctx.rows_per_expert):
            if count == 0:
                for grad in (grad_gate_EHF, grad_up_EHF, grad_down_EFH):
                    grad[e].zero_()
        for i, (e, rows) in enumerate(_spans(ctx.rows_per_expert)):
            gate, up = inner[2 * i : 2 * i + 2]
            grad_y = _pad(grad_RH[rows])
            # grad_y has fewer columns than the hidden layer: of the two, it is cheaper to transpose.
            silu = F.silu(gate)
            grad_down_EFH[e] = product(grad_y.t(), (silu * up).t()).t()
            grad_hidden = product(grad_y, w_down_EFH[e])
            grad_up = silu.mul_(grad_hidden)
            grad_gate = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
            x_t = _pad(x_RH[rows]).t().contiguous()
            grad_gate_EHF[e] = product(x_t, grad_gate.t())
            grad_up_EHF[e] = product(x_t, grad_up.t())
            by_gate, by_up = product(grad_gate, w_gate_EHF[e]), product(grad_up, w_up_EHF[e])
            count = rows.stop - rows.start
            torch.add(by_gate[:count], by_up[:count], out=grad_x_RH[rows])
        return grad_x_RH, grad_gate_EHF, grad_up_EHF, grad_down_EFH, None


def _spans(rows_per_expert: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, each with its rows."""
    start = 0
    for e, count in enumerate(rows_per_expert):
        if count:
            yield e, slice(start, start + count)
        start += count


def _pad(x_MH: Tensor) -> Tensor:
    """Append rows of zeros up to a number of rows that the product likes."""
    padding = padded_rows(x_MH.shape[0], x_MH) - x_MH.shape[0]
    return F.pad(x_MH, (0, 0, 0, padding)) if padding else x_MH
