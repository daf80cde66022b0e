"""Softmax statistics and gradient of the cross-entropy's logits in Triton, one read of the logits each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.ops.cross_entropy import RowStatistics

BLOCK_V = 4096
"""Logits of a row that a program has in registers at a time."""
INTERPRETER_BLOCK_V = 16
"""For the interpreter: small, so that small rows have several blocks."""
NUM_WARPS = 8
LOWEST_FLOAT32 = tl.constexpr(-3.4028234e38)
"""Start of a running maximum. -inf would have a distance of NaN to a logit of -inf."""


@triton.jit
def _statistics_kernel(logits, rows, tops, sums, targets, width, BLOCK: tl.constexpr):
    """Compute maximum, sum of exponentials (online softmax) and target logit of one row of logits."""
    token = tl.program_id(0).to(tl.int64)
    line = logits + token * width
    top = LOWEST_FLOAT32
    total = 0.0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(line + column, mask=column < width, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), 0)
        top = new_top
    row = tl.load(rows + token)
    tl.store(tops + token, top)
    tl.store(sums + token, total)
    tl.store(targets + token, tl.load(line + row, mask=row >= 0, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(logits, rows, normalizers, grads, out, width, HAS_NORMALIZER: tl.constexpr, BLOCK: tl.constexpr):
    """Compute grads[0] * (p - one_hot(row)) + grads[1] * p of one block of a row. `out` may be the logits."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = token * width + column
    z = tl.load(logits + cell, mask=column < width, other=0.0).to(tl.float32)
    probs = tl.exp(z - tl.load(normalizers + token))
    scaled = (probs - tl.where(column == tl.load(rows + token), 1.0, 0.0)) * tl.load(grads + token)
    if HAS_NORMALIZER:
        scaled += probs * tl.load(grads + tl.num_programs(0) + token)
    tl.store(out + cell, scaled.to(out.dtype.element_ty), mask=column < width)


class TritonCrossEntropyOps:
    """`CrossEntropyOps` of one kernel each, in float32. float64 has none."""

    def statistics(self, logits_CV: Tensor, row_C: Tensor) -> RowStatistics:
        """See `CrossEntropyOps`."""
        num_tokens, width = logits_CV.shape
        top_C, sum_C, target_C = torch.empty(3, num_tokens, dtype=torch.float32, device=logits_CV.device)
        if num_tokens:
            _statistics_kernel[(num_tokens,)](
                logits_CV, row_C.contiguous(), top_C, sum_C, target_C, width, BLOCK=_block_size(logits_CV),
                num_warps=NUM_WARPS,
            )  # fmt: skip
        return RowStatistics(top_C, sum_C, target_C)

    def gradient_out(
        self, out_CV: Tensor, logits_CV: Tensor, row_C: Tensor, normalizer_C: Tensor, grads_KC: Tensor
    ) -> None:
        """See `CrossEntropyOps`."""
        num_tokens, width = logits_CV.shape
        block = _block_size(logits_CV)
        if num_tokens:
            _gradient_kernel[(num_tokens, triton.cdiv(width, block))](
                logits_CV, row_C.contiguous(), normalizer_C.contiguous(), grads_KC.contiguous(), out_CV, width,
                HAS_NORMALIZER=len(grads_KC) == 2, BLOCK=block, num_warps=NUM_WARPS,
            )  # fmt: skip


def _block_size(x: Tensor) -> int:
    return BLOCK_V if x.is_cuda else INTERPRETER_BLOCK_V
