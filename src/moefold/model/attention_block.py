"""Attention of some queries over some keys with its log-sum-exp: the piece from which a ring builds the whole.

softmax over a union of key blocks is the average of the blocks' outputs, weighted by the exponentials of their
log-sum-exps (arXiv:2205.14135 sec. 3.1, arXiv:2310.01889). Gradients need no merging: given the output and the
log-sum-exp of the *union*, each block yields its exact share (arXiv:2205.14135 algorithm 4).

Shapes here: q [Sq, B, A, D], k and v [Sk, B, G, D], out [Sq, B, A, D], lse [Sq, B, A]. Query head a reads key/value
head a // (A/G). The log-sum-exp and every accumulation are float32, or float64 for float64 inputs.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from moefold.model.band import BlockedWindow
from moefold.model.gemm import is_faster_in_fp32

CUDA_FLASH_MAX_HEAD_SIZE = 256
"""Largest head of the CUDA flash kernel (torch: sdp_utils.cpp, check_head_dim_size_flash)."""
CUDA_FLASH_HEAD_MULTIPLE = 8
"""Heads of the CUDA flash kernel are multiples of this size (torch: flash_api.cpp, mha_fwd)."""

Mask = Literal["all", "causal"] | Tensor
"""Which keys the queries of a block see: all; query i keys 0..i, with Sq = Sk; or those of a bool [B or 1, Sq, Sk]."""
BlockMask = Mask | BlockedWindow
"""The same, or the last keys before each query, with Sq = Sk."""


class BlockKernel(Protocol):
    """One way to compute a block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""


def attention_block(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Attend from the queries to the keys of one block. Without autograd; local.

    Args:
        q: queries, [Sq, B, A, D].
        k: keys, [Sk, B, G, D].
        v: values, [Sk, B, G, D].
        block_mask: which keys each query sees.

    Returns:
        (out [Sq, B, A, D] normalised over this block, lse [Sq, B, A] of the scaled scores), strides as they come. A
        query that sees nothing has out = 0 and lse = -inf.
    """
    assert not _is_causal(block_mask) or q.shape[0] == k.shape[0], (q.shape, k.shape)
    if isinstance(block_mask, BlockedWindow):
        q_tiles, k_tiles, v_tiles, mask = block_mask.to_blocks(q, k, v)
        out, lse = attention_block(q_tiles, k_tiles, v_tiles, block_mask=mask)
        return block_mask.from_blocks(out, len(q)), block_mask.from_blocks(lse, len(q))
    return block_kernel(q, block_mask).forward(unit_stride(q), unit_stride(k), unit_stride(v), block_mask)


def attention_block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, block_mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that flow through one block. Local.

    Args:
        grad_out: gradient of the final output, [Sq, B, A, D].
        q: queries, [Sq, B, A, D].
        k: keys of the block, [Sk, B, G, D].
        v: values of the block, [Sk, B, G, D].
        out: final output, merged over all blocks that the queries see, [Sq, B, A, D].
        lse: log-sum-exp merged over the same blocks, [Sq, B, A]; finite.
        block_mask: as in the forward pass of this block.

    Returns:
        (dq, dk, dv): the block's share of the gradient of q; the gradients of its keys and values from these queries.
    """
    if isinstance(block_mask, BlockedWindow):
        q_tiles, k_tiles, v_tiles, mask = block_mask.to_blocks(q, k, v)
        # Behind the run there is no gradient, so its log-sum-exp there has only to be finite.
        given = (
            block_mask.to_query_blocks(grad_out),
            q_tiles,
            k_tiles,
            v_tiles,
            block_mask.to_query_blocks(out),
            block_mask.to_query_blocks(lse),
        )
        dq, dk, dv = attention_block_backward(*given, block_mask=mask)
        return (
            block_mask.from_blocks(dq, len(q)),
            block_mask.kv_grad_from_blocks(dk, len(q)),
            block_mask.kv_grad_from_blocks(dv, len(q)),
        )
    grad_out, q, k, v, out = (unit_stride(x) for x in (grad_out, q, k, v, out))
    return block_kernel(q, block_mask).backward(grad_out, q, k, v, out, lse, block_mask)


def merge_lse_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold a block over further keys into the running result of the same queries, in place.

    Args:
        out: running output, [Sq, B, A, D], float32 or float64.
        lse: running log-sum-exp, [Sq, B, A], of the same type; finite, as each query sees itself in the first block.
        block_out: output of the block, [Sq, B, A, D], any floating type.
        block_lse: log-sum-exp of the block, [Sq, B, A]; -inf changes nothing.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def block_kernel(q: Tensor, block_mask: Mask) -> BlockKernel:
    """The fastest kernel that computes exactly this device, type, head size and sight."""
    if q.device.type == "cpu" and q.is_floating_point():
        return CpuFlash()
    if (
        q.device.type == "cuda"
        and isinstance(block_mask, str)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % CUDA_FLASH_HEAD_MULTIPLE == 0
        and q.shape[-1] <= CUDA_FLASH_MAX_HEAD_SIZE
    ):
        return CudaFlash()
    return MathBlockAttention()


class CpuFlash:
    """The CPU flash kernel; every floating type, no [Sq, Sk] matrix in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        if is_faster_in_fp32(q):
            out, lse = self.forward(q.float(), k.float(), v.float(), block_mask)
            return out.to(q.dtype), lse
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        heads_first = (_heads_first(q), _heads_first(k), _heads_first(v))
        out, lse = flash(*heads_first, 0.0, _is_causal(block_mask), attn_mask=_additive_mask(block_mask, q.dtype))
        if isinstance(block_mask, Tensor):
            # The kernel leaves 0 where a query sees nothing.
            lse = lse.masked_fill(~block_mask.any(-1).unsqueeze(1), float("-inf"))
        return _sequence_first(out), lse.permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        if is_faster_in_fp32(q):
            wide = self.backward(grad_out.float(), q.float(), k.float(), v.float(), out.float(), lse, block_mask)
            dq, dk, dv = (x.to(q.dtype) for x in wide)
            return dq, dk, dv
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = (_heads_first(x) for x in (grad_out, q, k, v, out))
        mask = _additive_mask(block_mask, q.dtype)
        dq, dk, dv = flash(*tensors, lse.permute(1, 2, 0), 0.0, _is_causal(block_mask), attn_mask=mask)
        return _sequence_first(dq), _sequence_first(dk), _sequence_first(dv)


class CudaFlash:
    """The CUDA flash kernel; bfloat16 and float16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(_heads_first(q), _heads_first(k), _heads_first(v), 0.0, _is_causal(block_mask))
        return _sequence_first(out), lse.permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        tensors = (_heads_first(x) for x in (grad_out, q, k, v, out))
        # The state of the dropout generator is read only with dropout; the kernel takes lse as a plain array.
        seed, offset = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        lse = lse.permute(1, 2, 0).contiguous()
        lengths = (None, None, q.shape[0], k.shape[0])
        dq, dk, dv = flash(*tensors, lse, *lengths, 0.0, _is_causal(block_mask), seed, offset)
        return _sequence_first(dq), _sequence_first(dk), _sequence_first(dv)


class MathBlockAttention:
    """The same in plain tensor maths, for every device and type; holds one [B, A, Sq, Sk] matrix."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        q_SBGRD, k_SBGD, v_SBGD = _group_heads(q, k), _upcast(k), _upcast(v)
        scores = _masked_scores(q_SBGRD, k_SBGD, block_mask)
        lse = scores.logsumexp(-1)
        # Where a query sees nothing, -inf - (-inf) would be no number.
        probs = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
        out = torch.einsum("bgrst,tbgd->sbgrd", probs, v_SBGD)
        return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2).permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        q_SBGRD, grad_SBGRD, k_SBGD, v_SBGD = _group_heads(q, k), _group_heads(grad_out, k), _upcast(k), _upcast(v)
        lse_BGRS = lse.permute(1, 2, 0).unflatten(1, (k.shape[2], -1))
        probs = torch.exp(_masked_scores(q_SBGRD, k_SBGD, block_mask) - lse_BGRS.unsqueeze(-1))
        delta_BGRS = (grad_SBGRD * _group_heads(out, k)).sum(-1).permute(1, 2, 3, 0)
        grad_probs = torch.einsum("sbgrd,tbgd->bgrst", grad_SBGRD, v_SBGD)
        grad_scores = probs * (grad_probs - delta_BGRS.unsqueeze(-1)) * q.shape[-1] ** -0.5
        dq = torch.einsum("bgrst,tbgd->sbgrd", grad_scores, k_SBGD).flatten(2, 3)
        dk = torch.einsum("bgrst,sbgrd->tbgd", grad_scores, q_SBGRD)
        dv = torch.einsum("bgrst,sbgrd->tbgd", probs, grad_SBGRD)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of sums over blocks: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _is_causal(block_mask: BlockMask) -> bool:
    return isinstance(block_mask, str) and block_mask == "causal"


def _additive_mask(block_mask: Mask, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, [B, 1, Sq, Sk]: 0, or -inf for a hidden key."""
    if not isinstance(block_mask, Tensor):
        return None
    return (
        torch.zeros(block_mask.shape, dtype=dtype, device=block_mask.device)
        .masked_fill_(~block_mask, float("-inf"))
        .unsqueeze(1)
    )


def _masked_scores(q_SBGRD: Tensor, k_SBGD: Tensor, block_mask: Mask) -> Tensor:
    scores = torch.einsum("sbgrd,tbgd->bgrst", q_SBGRD * q_SBGRD.shape[-1] ** -0.5, k_SBGD)
    if isinstance(block_mask, Tensor):
        return scores.masked_fill_(~block_mask[:, None, None], float("-inf"))
    if block_mask == "causal":
        rows, columns = scores.shape[-2:]
        future = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(future, float("-inf"))
    return scores


def _group_heads(x_SBAD: Tensor, k_SBGD: Tensor) -> Tensor:
    """[S, B, A, D] -> [S, B, G, A/G, D] in the type of the sums."""
    return _upcast(x_SBAD).unflatten(2, (k_SBGD.shape[2], -1))


def _upcast(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _heads_first(x_SBAD: Tensor) -> Tensor:
    return x_SBAD.permute(1, 2, 0, 3)


def _sequence_first(x_BASD: Tensor) -> Tensor:
    return x_BASD.permute(2, 0, 1, 3)


def unit_stride(x: Tensor) -> Tensor:
    """A tensor as kernels read it: they address every stride but the last, which they take to be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()
