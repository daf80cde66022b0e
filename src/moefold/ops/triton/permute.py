"""Combine of permuted tokens and its gradient in Triton, for dispatchers that permute outside of the experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.expert_ops import Permutation, unit_stride
from moefold.ops.permute import TORCH_PERMUTE_OPS
from moefold.ops.triton.grouped_gemm import combine_rows
from moefold.ops.triton.wire_format import pack_rows, unpack_rows


@triton.jit
def _combine_backward_kernel(
    grad, y, token_ids, topk_indices, non_padding, probs, grad_rows, grad_probs, num_rows, width, stride_g, stride_y,
    HAS_PADDING: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute grad_rows[r] = p * grad[token of r] and grad_probs[index of r] = grad[token of r] . y[r]."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    is_read = is_row
    if HAS_PADDING:
        is_read = is_read & (tl.load(non_padding + row, mask=is_row, other=0) != 0)
    token = tl.load(token_ids + row, mask=is_read, other=0).to(tl.int64)
    index = tl.load(topk_indices + row, mask=is_read, other=0).to(tl.int64)
    prob = tl.load(probs + index, mask=is_read, other=0.0).to(tl.float32)
    dot = tl.zeros((BLOCK_R,), dtype=tl.float32)
    row = row.to(tl.int64)
    for first in range(0, width, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        is_column = (column < width)[None, :]
        g = tl.load(
            grad + token[:, None] * stride_g + column[None, :], mask=is_read[:, None] & is_column, other=0.0
        ).to(tl.float32)
        value = tl.load(y + row[:, None] * stride_y + column[None, :], mask=is_read[:, None] & is_column, other=0.0).to(
            tl.float32
        )
        dot += tl.sum(g * value, axis=1)
        cell = grad_rows + row[:, None] * width + column[None, :]
        tl.store(cell, (g * prob[:, None]).to(grad_rows.dtype.element_ty), mask=is_row[:, None] & is_column)
    tl.store(grad_probs + index, dot.to(grad_probs.dtype.element_ty), mask=is_read)


class TritonPermuteOps:
    """`PermuteOps` of kernels that read and write each row once, in one launch."""

    def permute(self, x_TH: Tensor, permutation: Permutation) -> Tensor:
        """See `PermuteOps`. Torch's gather is one kernel already, two with padding."""
        return TORCH_PERMUTE_OPS.permute(x_TH, permutation)

    def combine(self, y_RH: Tensor, permutation: Permutation, probs_TK: Tensor | None) -> Tensor:
        """See `PermuteOps`."""
        return combine_rows(unit_stride(y_RH), permutation.row_TK, permutation.kept_TK, probs_TK)

    def combine_backward(
        self, grad_TH: Tensor, y_RH: Tensor, permutation: Permutation, probs_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `PermuteOps`. It reads y and the gradient once, and writes the gradient of each probability in place."""
        grad = unit_stride(grad_TH)
        y = unit_stride(y_RH)
        num_rows, width = y.shape
        grad_RH = torch.empty((num_rows, width), dtype=y.dtype, device=y.device)
        grad_TK = torch.empty(probs_TK.shape, dtype=probs_TK.dtype, device=probs_TK.device)
        if num_rows == 0 or width == 0:
            return grad_RH, grad_TK.zero_()
        block_r, block_n = (4, 512) if y.is_cuda else (4, 32)
        non_padding_R = permutation.non_padding_R
        _combine_backward_kernel[(triton.cdiv(num_rows, block_r),)](
            grad, y, permutation.token_R, permutation.topk_index_R,
            permutation.token_R if non_padding_R is None else non_padding_R.to(torch.uint8),
            probs_TK.contiguous(), grad_RH, grad_TK, num_rows, width, grad.stride(0), y.stride(0),
            HAS_PADDING=non_padding_R is not None, BLOCK_R=block_r, BLOCK_N=block_n,
        )  # fmt: skip
        # A dropped token has no row that writes its gradient, or an undefined row after the last expert.
        return grad_RH, grad_TK if permutation.kept_TK is None else grad_TK.masked_fill_(~permutation.kept_TK, 0.0)

    def pack(self, x_RH: Tensor) -> Tensor:
        """See `PermuteOps`."""
        return pack_rows(x_RH)

    def unpack(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """See `PermuteOps`."""
        return unpack_rows(packed, width, dtype)
