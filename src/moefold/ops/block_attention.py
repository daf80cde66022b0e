"""Blockwise attention with log-sum-exp, attention sinks and sliding windows, the building block of ring attention.

The softmax over a union of key blocks is the average of the blocks' outputs, weighted by the exponentials of their
log-sum-exps (arXiv:2205.14135 sec. 3.1, arXiv:2310.01889). Gradients need no merging: given the output and the
log-sum-exp of the *union*, each block yields its exact share (arXiv:2205.14135 algorithm 4).

Shapes here: q [Sq, B, A, D], k and v [Sk, B, G, D], out [Sq, B, A, D], lse [Sq, B, A]. Query head a reads key/value
head a // (A/G). The log-sum-exp and every accumulation are float32, or float64 for float64 inputs.

Attention sinks are a learned logit per head that takes part in the softmax without a value (arXiv:2309.17453). The
output with a sink is the output without, scaled by 1 - exp(sink - lse), with lse the log-sum-exp over keys and sink
(gpt-oss, arXiv:2508.10925). A sink is one more key whose value is zero. It is merged once, after the union of all
blocks. The backward pass of each block is exact, given the output and the log-sum-exp with the sink.

The flash kernel of CUDA and the C kernel of a CPU take sliding windows and packed documents directly (`FlashMask`).
Without the C kernel a CPU computes windows in blocks that skip keys outside the window. Blocks are at least as long as
the window reaches back, so the T queries of a block attend to the keys of this block and of the previous block. The
sequence becomes a batch of attention over T queries and 2T keys. The work grows with S * T instead of S * S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.comm.private_torch import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)
from moefold.message_text import first_line
from moefold.ops.documents import Segments
from moefold.ops.elementwise import widened
from moefold.ops.expert_ops import unit_stride
from moefold.ops.gemm import is_faster_in_fp32


def scale_queries(q: Tensor, scale: float | None) -> Tensor:
    """Return queries rescaled for a kernel that multiplies scores by 1/sqrt(D), or unchanged for `scale` None."""
    return q if scale is None else q * (scale * q.shape[-1] ** 0.5)


def fold_in_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks, unchanged without sinks.

    Args:
        out: attention over all keys, [S, B, A, D].
        lse: log-sum-exp over them, [S, B, A], float32 or float64.
        sinks: one logit for each head, [A].
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype), total


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Compute the gradient of the sinks, [A], from these queries. Return None without sinks.

    Args:
        grad_out: gradient of the output with the sinks, [S, B, A, D].
        out: that output, [S, B, A, D].
        lse: log-sum-exp with the sinks, [S, B, A].
        sinks: [A].
    """
    if sinks is None:
        return None
    # d loss / d score = p * (grad_out . value - grad_out . out), and the value of a sink is zero.
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)


MIN_BLOCK_TOKENS = 64
"""Minimum block length. Shorter blocks underuse the kernels."""
MIN_BLOCKS = 4
"""Minimum number of blocks. With fewer, skipping keys does not pay."""


@dataclass(frozen=True)
class BlockedWindow:
    """Sliding window over S contiguous tokens: query i attends to keys max(i - window + 1, starts[i]) .. i."""

    window: int
    document_starts: Tensor | None = None
    """Start index of each token's document, int64 [S, B]. It may be negative. None if there is no limit."""

    @property
    def block_size(self) -> int:
        """Tokens of a block, T."""
        return max(self.window - 1, MIN_BLOCK_TOKENS)

    @staticmethod
    def is_worthwhile(window: int, length: int) -> bool:
        """Return whether blocks save work for this many tokens on a CPU."""
        return window > 0 and length >= MIN_BLOCKS * max(window - 1, MIN_BLOCK_TOKENS)

    def to_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split the tokens into a batch of n blocks.

        Args:
            q: queries, [S, B, A, D].
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].

        Returns:
            (queries [T, n*B, A, D], keys and values [2T, n*B, G, D], mask bool [n*B, T, 2T]). Every query attends to
            itself, also the padding queries of the last block.
        """
        return (
            self.to_query_blocks(q),
            self._with_previous_block(k),
            self._with_previous_block(v),
            self._mask(q.shape[0], q.shape[1], q.device),
        )

    def to_query_blocks(self, x: Tensor) -> Tensor:
        """Split [S, B, ...] into [T, n*B, ...], zero-padded at the end."""
        return self._split_into_blocks(x).transpose(0, 1).flatten(1, 2)

    def from_blocks(self, x: Tensor, length: int) -> Tensor:
        """Join query blocks, [T, n*B, ...] -> [S, B, ...]."""
        num_blocks = -(-length // self.block_size)
        return x.unflatten(1, (num_blocks, -1)).transpose(0, 1).flatten(0, 1)[:length]

    def kv_grad_from_blocks(self, grad: Tensor, length: int) -> Tensor:
        """Join gradients of keys or values, [2T, n*B, ...] -> [S, B, ...]: each block was read by two query blocks."""
        previous, current = grad.chunk(2)
        total = self.from_blocks(current, length).clone()
        # Gradients from the queries of the next block.
        from_next = self.from_blocks(previous, -(-length // self.block_size) * self.block_size)[self.block_size :]
        total[: len(from_next)] += from_next[:length]
        return total

    def _split_into_blocks(self, x: Tensor) -> Tensor:
        """Split x into [n, T, B, ...]."""
        padding = -len(x) % self.block_size
        x = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, padding)) if padding else x
        return x.unflatten(0, (-1, self.block_size))

    def _with_previous_block(self, x: Tensor) -> Tensor:
        blocks = self._split_into_blocks(x)
        previous = torch.cat((torch.zeros_like(blocks[:1]), blocks[:-1]))
        return torch.cat((previous, blocks), 1).transpose(0, 1).flatten(1, 2)

    def _mask(self, length: int, batch: int, device: torch.device) -> Tensor:
        size = self.block_size
        num_blocks = -(-length // self.block_size)
        query = torch.arange(num_blocks * size, device=device).view(num_blocks, 1, size, 1)
        key = query.view(num_blocks, 1, 1, size)[:, :, :, :1] + torch.arange(-size, size, device=device)
        mask = (key >= 0) & (key <= query) & (key > query - self.window)
        if self.document_starts is not None:
            starts = F.pad(self.document_starts, (0, 0, 0, num_blocks * size - length), value=length)
            mask = mask & (key >= starts.view(num_blocks, size, batch).transpose(1, 2).unsqueeze(-1))
        return mask.expand(num_blocks, batch, size, 2 * size).flatten(0, 1)


PROBE_TOLERANCE = 3e-2
"""Largest error of bfloat16 outputs and gradients of a probe over the largest value: a few roundings, 2**-8."""
PROBE_LSE_TOLERANCE = 1e-3
CUDA_FLASH_MAX_HEAD_SIZE = 256
"""Largest head dim of the CUDA flash kernel (torch: sdp_utils.cpp, check_head_dim_size_flash)."""
CUDA_FLASH_HEAD_MULTIPLE = 8
"""Head dims of the CUDA flash kernel are multiples of this (torch: flash_api.cpp, mha_fwd)."""

Mask = Literal["all", "causal"] | Tensor
"""Attended keys: all, or "causal" (query i attends to keys 0..i, with Sq = Sk), or a bool mask [B or 1, Sq, Sk]."""


@dataclass(frozen=True)
class FlashMask:
    """Limits that the CUDA flash kernel and the C kernel take directly, without a mask in memory.

    The last query is aligned with the last key: the place of query i among the keys is i + Sk - Sq.
    """

    is_causal: bool
    """True if a query attends to no key after its place."""
    window_left: int = -1
    """Maximum number of keys before its place that a query attends to. -1: no limit."""
    segments: Segments | None = None
    """Documents: a query attends to the keys of its document, or None if each sample is one document."""
    query_segments: Segments | None = None
    """The queries of each document, which belong to its last tokens, for B = 1. None means all tokens (Sq = Sk)."""


BlockMask = Mask | BlockedWindow | FlashMask
"""A `Mask`, a sliding window (with Sq = Sk), or limits for a kernel that takes them."""


class BlockKernel(Protocol):
    """Attention kernel for one block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""


class CausalKernel(BlockKernel, Protocol):
    """Kernel of causal attention for one device and one dtype."""

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel supports these tensors, [S, B, heads, D]."""
        ...


def attention_block(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, kernel: BlockKernel | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention from the queries to the keys of one block, without autograd and communication.

    Args:
        q: queries, [Sq, B, A, D].
        k: keys, [Sk, B, G, D].
        v: values, [Sk, B, G, D].
        block_mask: keys that each query attends to.
        kernel: kernel of blocks that are "all" or "causal". None means the fastest kernel of this file.

    Returns:
        (out [Sq, B, A, D] normalised over this block, lse [Sq, B, A] of the scaled scores), with any strides. A fully
        masked query has out = 0 and lse = -inf.
    """
    assert not is_causal(block_mask) or q.shape[0] == k.shape[0], (q.shape, k.shape)
    if isinstance(block_mask, BlockedWindow):
        q_blocks, k_blocks, v_blocks, mask = block_mask.to_blocks(q, k, v)
        out, lse = attention_block(q_blocks, k_blocks, v_blocks, block_mask=mask)
        return block_mask.from_blocks(out, len(q)), block_mask.from_blocks(lse, len(q))
    q, k, v = (unit_stride(x) for x in (q, k, v))
    if isinstance(block_mask, FlashMask):
        return CudaFlash().forward(q, k, v, block_mask)
    kernel = kernel if kernel is not None and isinstance(block_mask, str) else block_kernel(q, block_mask)
    return kernel.forward(q, k, v, block_mask)


def attention_block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    block_mask: BlockMask,
    kernel: BlockKernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients through one block. It does not communicate.

    Args:
        grad_out: gradient of the final output, [Sq, B, A, D].
        q: queries, [Sq, B, A, D].
        k: keys of the block, [Sk, B, G, D].
        v: values of the block, [Sk, B, G, D].
        out: final output, merged over all blocks that the queries attend to, [Sq, B, A, D].
        lse: log-sum-exp merged over the same blocks, [Sq, B, A], finite.
        block_mask, kernel: as in the forward pass of this block.

    Returns:
        (dq, dk, dv): the block's share of the gradient of q, and gradients of its keys and values from these queries.
    """
    if isinstance(block_mask, BlockedWindow):
        q_blocks, k_blocks, v_blocks, mask = block_mask.to_blocks(q, k, v)
        # The gradient of padding is zero, so its log-sum-exp only has to be finite.
        args = (
            block_mask.to_query_blocks(grad_out),
            q_blocks,
            k_blocks,
            v_blocks,
            block_mask.to_query_blocks(out),
            block_mask.to_query_blocks(lse),
        )
        dq, dk, dv = attention_block_backward(*args, block_mask=mask)
        return (
            block_mask.from_blocks(dq, len(q)),
            block_mask.kv_grad_from_blocks(dk, len(q)),
            block_mask.kv_grad_from_blocks(dv, len(q)),
        )
    grad_out, q, k, v, out = (unit_stride(x) for x in (grad_out, q, k, v, out))
    if isinstance(block_mask, FlashMask):
        return CudaFlash().backward(grad_out, q, k, v, out, lse, block_mask)
    kernel = kernel if kernel is not None and isinstance(block_mask, str) else block_kernel(q, block_mask)
    return kernel.backward(grad_out, q, k, v, out, lse, block_mask)


def merge_lse_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block over other keys into the running result of the same queries, in place.

    Args:
        out: running output, [Sq, B, A, D], float32 or float64.
        lse: running log-sum-exp, [Sq, B, A], of the same dtype, finite, as each query attends to itself in the first
            block.
        block_out: output of the block, [Sq, B, A, D], any floating dtype.
        block_lse: log-sum-exp of the block, [Sq, B, A]. -inf changes nothing.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)


def block_kernel(q: Tensor, block_mask: Mask) -> BlockKernel:
    """Return the fastest kernel that supports this device, dtype, head dim and mask."""
    if q.device.type == "cpu" and q.is_floating_point():
        return CpuFlash()
    if isinstance(block_mask, str) and CudaFlash.supports(q):
        return CudaFlash()
    return MathBlockAttention()


class CpuFlash:
    """CPU flash kernel, for every floating dtype, without an [Sq, Sk] matrix in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        if is_faster_in_fp32(q):
            out, lse = self.forward(q.float(), k.float(), v.float(), block_mask)
            return out.to(q.dtype), lse
        flash = cpu_flash_attention()
        tensors = (heads_first(x) for x in (q, k, v))
        out, lse = flash(*tensors, 0.0, is_causal(block_mask), attn_mask=_addend(block_mask, q.dtype))
        if isinstance(block_mask, Tensor):
            # The kernel returns 0 for fully masked queries.
            lse = lse.masked_fill(~block_mask.any(-1).unsqueeze(1), float("-inf"))
        return _sequence_first(out), lse.permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        if is_faster_in_fp32(q):
            grads = self.backward(grad_out.float(), q.float(), k.float(), v.float(), out.float(), lse, block_mask)
            dq, dk, dv = (x.to(q.dtype) for x in grads)
            return dq, dk, dv
        flash = cpu_flash_attention_backward()
        tensors = (heads_first(x) for x in (grad_out, q, k, v, out))
        mask = _addend(block_mask, q.dtype)
        dq, dk, dv = flash(*tensors, lse.permute(1, 2, 0), 0.0, is_causal(block_mask), attn_mask=mask)
        return _sequence_first(dq), _sequence_first(dk), _sequence_first(dv)


class CudaFlash:
    """CUDA flash kernel with sliding windows and sequences of variable length, for bfloat16 and float16.

    It reads [B, S, heads, D] by its strides. Sequences of variable length are read as [B*S, heads, D], which is a copy
    if B is not 1.
    """

    @staticmethod
    def supports(q: Tensor) -> bool:
        """Return whether the kernel supports heads of this device, dtype and size."""
        return (
            q.device.type == "cuda"
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[-1] % CUDA_FLASH_HEAD_MULTIPLE == 0
            and q.shape[-1] <= CUDA_FLASH_MAX_HEAD_SIZE
        )

    def supports_tasks(self, q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
        """Return whether the kernel supports tasks on these tensors. See `FlashMask.query_segments`."""
        return self.supports(q) and k.shape == v.shape

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask | FlashMask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        mask = _flash_mask(block_mask)
        tensors = (_to_flash(x, mask) for x in (q, k, v))
        out, lse, *_ = cuda_flash_attention()(
            *tensors, *_lengths(q, k, mask), 0.0, mask.is_causal, False, **_window_args(mask)
        )
        if mask.segments is not None:
            lse = lse.unflatten(1, (q.shape[1], -1)).transpose(0, 1)
        return _from_flash(out, q, mask), lse.permute(2, 0, 1)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block_mask: Mask | FlashMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        mask = _flash_mask(block_mask)
        tensors = (_to_flash(x, mask) for x in (grad_out, q, k, v, out))
        # The RNG state is read only with dropout. The kernel needs a contiguous lse.
        seed = q.new_empty(2, dtype=torch.uint64)
        offset = q.new_empty((), dtype=torch.uint64)
        lse = lse.permute(1, 2, 0) if mask.segments is None else lse.permute(2, 1, 0).flatten(1)
        gradients = cuda_flash_attention_backward()(
            *tensors, lse.contiguous(), *_lengths(q, k, mask), 0.0, mask.is_causal, seed, offset, **_window_args(mask)
        )
        dq, dk, dv = (_from_flash(x, like, mask) for x, like in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv


class MathBlockAttention:
    """Reference implementation in PyTorch operations, for every device and dtype, with a [B, A, Sq, Sk] matrix."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        q_SBGRD = _group_heads(q, k)
        k_SBGD = widened(k)
        v_SBGD = widened(v)
        scores = _masked_scores(q_SBGRD, k_SBGD, block_mask)
        lse = scores.logsumexp(-1)
        # For fully masked queries, -inf - (-inf) would be NaN.
        probs = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
        out = torch.einsum("bgrst,tbgd->sbgrd", probs, v_SBGD)
        return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2).permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: Mask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        q_SBGRD = _group_heads(q, k)
        grad_SBGRD = _group_heads(grad_out, k)
        k_SBGD = widened(k)
        v_SBGD = widened(v)
        lse_BGRS = lse.permute(1, 2, 0).unflatten(1, (k.shape[2], -1))
        probs = torch.exp(_masked_scores(q_SBGRD, k_SBGD, block_mask) - lse_BGRS.unsqueeze(-1))
        delta_BGRS = (grad_SBGRD * _group_heads(out, k)).sum(-1).permute(1, 2, 3, 0)
        grad_probs = torch.einsum("sbgrd,tbgd->bgrst", grad_SBGRD, v_SBGD)
        grad_scores = probs * (grad_probs - delta_BGRS.unsqueeze(-1)) * q.shape[-1] ** -0.5
        dq = torch.einsum("bgrst,tbgd->sbgrd", grad_scores, k_SBGD).flatten(2, 3)
        dk = torch.einsum("bgrst,sbgrd->tbgd", grad_scores, q_SBGRD)
        dv = torch.einsum("bgrst,sbgrd->tbgd", probs, grad_SBGRD)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def disagreement(kernel: BlockKernel, inputs: Sequence[Tensor], mask: Any, exact_mask: Mask) -> str:
    """Compare both passes of a kernel with the definition, and return "raises ..." or "differs ...", "" if they agree.

    Args:
        kernel: attention with log-sum-exp.
        inputs: gradient of the output, queries, keys and values.
        mask: mask in the form of the kernel.
        exact_mask: the same mask.
    """
    exact = _both_passes(MathBlockAttention(), [x.double() for x in inputs], exact_mask)
    try:
        results = _both_passes(kernel, inputs, mask)
    except RuntimeError as error:
        return f"raises {first_line(error)!r}"
    errors = [float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(results, exact, strict=True)]
    limits = (PROBE_TOLERANCE, PROBE_LSE_TOLERANCE, *[PROBE_TOLERANCE] * 3)
    if all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        return ""
    return f"differs from the definition by {max(errors):.2g}"


def _both_passes(kernel: BlockKernel, inputs: Sequence[Tensor], mask: Any) -> list[Tensor]:
    grad_out, q, k, v = inputs
    out, lse = kernel.forward(q, k, v, mask)
    return [out, lse, *kernel.backward(grad_out, q, k, v, out, lse, mask)]


def random_tensors(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the same normal random numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over blocks: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def is_causal(block_mask: BlockMask) -> bool:
    """Return whether a mask is "causal"."""
    return isinstance(block_mask, str) and block_mask == "causal"


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an addend of the scores, [B, 1, Sq, Sk]: 0, or -inf for a masked key."""
    addend = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return addend.masked_fill_(~mask, float("-inf")).unsqueeze(1)


def _addend(block_mask: Mask, dtype: torch.dtype) -> Tensor | None:
    return additive_mask(block_mask, dtype) if isinstance(block_mask, Tensor) else None


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
    """Group query heads, [S, B, A, D] -> [S, B, G, A/G, D], in the accumulation dtype."""
    return widened(x_SBAD).unflatten(2, (k_SBGD.shape[2], -1))


def heads_first(x_SBAD: Tensor) -> Tensor:
    """Return a view [B, A, S, D]."""
    return x_SBAD.permute(1, 2, 0, 3)


def _sequence_first(x_BASD: Tensor) -> Tensor:
    return x_BASD.permute(2, 0, 1, 3)


def _flash_mask(block_mask: Mask | FlashMask) -> FlashMask:
    assert not isinstance(block_mask, Tensor), "the flash kernel reads no mask"
    return block_mask if isinstance(block_mask, FlashMask) else FlashMask(is_causal(block_mask))


def _to_flash(x_SBAD: Tensor, mask: FlashMask) -> Tensor:
    """Return [B, S, heads, D] without a copy, or [B*S, heads, D] for sequences of variable length."""
    x_BSAD = x_SBAD.transpose(0, 1)
    return x_BSAD if mask.segments is None else x_BSAD.flatten(0, 1)


def _from_flash(x: Tensor, like_SBAD: Tensor, mask: FlashMask) -> Tensor:
    """Return [S, B, heads, D] without a copy."""
    x_BSAD = x if mask.segments is None else x.unflatten(0, (like_SBAD.shape[1], -1))
    return x_BSAD.transpose(0, 1)


def _lengths(q: Tensor, k: Tensor, mask: FlashMask) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return cumulative lengths of queries and of keys, and the greatest length of each, in the kernel's form."""
    segments = mask.segments
    if segments is None:
        return None, None, q.shape[0], k.shape[0]
    queries = mask.query_segments or segments
    return queries.cu_seqlens, segments.cu_seqlens, queries.max_length, segments.max_length


def _window_args(mask: FlashMask) -> dict[str, int]:
    """Return the numbers of keys before and after its place that a query attends to. -1: no limit."""
    return {"window_size_left": mask.window_left, "window_size_right": 0 if mask.is_causal else -1}


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Compute SDPA, causal without a mask, of [S, B, heads, D] each. The result is a view of [B, A, S, D].

    enable_gqa makes SDPA read each key/value head in place, without a copy for its A/G query heads. With equal head
    counts it would only rule out kernels.
    """
    out = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.permute(2, 0, 1, 3)
