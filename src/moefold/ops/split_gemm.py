"""Linear layer of a 16-bit input with a float32 weight, at float32 accuracy on tensor cores: the router's logits.

A GPU multiplies float32 matrices without tensor cores (TF32 has 10 bits). A float32 number is the sum of three bfloat16
numbers of 8 significant bits each, and tensor cores accumulate exact products of bfloat16 numbers in float32. So each
float32 operand is split into three parts, and one bfloat16 GEMM multiplies all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moefold.ops.gemm import TORCH_GEMM, Gemm

NUM_PARTS = 3
"""Parts of 8 bits each that represent the 24 significant bits of float32."""
PART_PAIRS = ((0, 2), (0, 1), (0, 0), (1, 0), (2, 0), (1, 1))
"""Parts of two float32 operands that are multiplied: the products of all other pairs are below float32's precision."""
FIRST_WHOLE_PAIR = 2
"""From this pair on, the first members are the parts 0, 1, 2 in this order."""


def upcast_linear(x_TH: Tensor, w_EH: Tensor, gemm: Gemm = TORCH_GEMM) -> Tensor:
    """Compute x @ w.T in the dtype of w, [T, E], at least as precise as the dtype of x. It saves x in its own dtype.

    The result and both gradients have the accuracy of a GEMM in the dtype of w. `gemm` is the backend of the result if
    operands are not split.
    """
    splits = x_TH.device.type != "cpu" and x_TH.dtype == torch.bfloat16 and w_EH.dtype == torch.float32
    return UpcastLinear.apply(x_TH, w_EH, splits, gemm)


def split_fp32(x: Tensor) -> Tensor:
    """Split float32 numbers into sums of three bfloat16 parts [3, ...], the largest part first."""
    terms = torch.empty(NUM_PARTS, *x.shape, dtype=torch.bfloat16, device=x.device)
    for i, term in enumerate(terms):
        term.copy_(x)
        if i + 1 < NUM_PARTS:
            x = x - term
    return terms


class UpcastLinear(torch.autograd.Function):
    """See `upcast_linear`. `splits` chooses between bfloat16 GEMMs of parts and one GEMM of upcast operands."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_EH: Tensor, splits: bool, gemm: Gemm = TORCH_GEMM) -> Tensor:
        """Compute x @ w.T. It saves its arguments unchanged."""
        ctx.splits = splits
        ctx.save_for_backward(x_TH, w_EH)
        if not splits:
            x = x_TH.to(w_EH.dtype)
            # torch.mm has the smallest error of the libraries' GEMMs.
            return x @ w_EH.t() if gemm is TORCH_GEMM else gemm.matmul(x, w_EH)
        w_PEH = split_fp32(w_EH)
        y_TPE = _mm(x_TH, w_PEH.flatten(0, 1).t(), torch.float32).unflatten(1, w_PEH.shape[:2])
        return y_TPE.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Compute the gradient of x in its dtype, rounded once, and the gradient of w in its own dtype."""
        x_TH, w_EH = ctx.saved_tensors
        if not ctx.splits:
            return (grad_TE @ w_EH).to(x_TH.dtype), grad_TE.t() @ x_TH.to(w_EH.dtype), None, None
        num_experts = grad_TE.shape[1]
        grad_PTE = split_fp32(grad_TE)
        w_PEH = split_fp32(w_EH)
        grad_TX = torch.cat([grad_PTE[i] for i, _ in PART_PAIRS], 1)
        w_XH = torch.cat([w_PEH[j] for _, j in PART_PAIRS])
        parts_TX = grad_TX[:, FIRST_WHOLE_PAIR * num_experts : (FIRST_WHOLE_PAIR + NUM_PARTS) * num_experts]
        grad_w_PEH = _mm(parts_TX.t(), x_TH, torch.float32).unflatten(0, (NUM_PARTS, num_experts))
        return _mm(grad_TX, w_XH, x_TH.dtype), grad_w_PEH.sum(0), None, None


def _mm(a_MK: Tensor, b_KN: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply bfloat16 matrices, accumulate in float32, and round once to a dtype."""
    if a_MK.device.type == "cpu":
        return (a_MK.float() @ b_KN.float()).to(dtype)
    return torch.mm(a_MK, b_KN, out_dtype=dtype)
