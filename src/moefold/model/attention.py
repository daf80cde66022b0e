"""Causal self-attention with grouped queries (GQA, arXiv:2305.13245), within documents and sliding windows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefold.config.model import ModelConfig
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.local_param import local_param
from moefold.model.norm import FullWidthQKNorm, RMSNorm
from moefold.model.tp_interface import NoSequenceParallel, SequenceParallel
from moefold.ops.block_attention import (
    BlockedWindow,
    BlockKernel,
    BlockMask,
    CausalKernel,
    attention_block,
    attention_block_backward,
    fold_in_sinks,
    sink_gradient,
)
from moefold.ops.gemm import is_faster_in_fp32
from moefold.ops.rope import Rope


@dataclass(frozen=True)
class AttentionMaskSpec:
    """Limits of a query's context in addition to causality. Positions are those of the whole sample.

    A query at position p attends to the keys at f .. p, f = max(start of its document, p - window + 1). Documents are
    contiguous, so the start of the query's document suffices, and no mask data is sent with the keys.
    """

    window: int = 0
    """Sliding window: most keys that a query attends to, its own included; 0: no limit."""
    document_starts: Tensor | None = None
    """Position at which the document of each token begins, int64 [S, B] for the whole sample; None: one document."""

    def needs_mask(self, seq_len: int) -> bool:
        """Return whether a query of a sample of this length may attend to less than its causal context."""
        return self.document_starts is not None or 0 < self.window < seq_len

    def local_mask(self, first: int, q: Tensor) -> "Literal['causal'] | Tensor | BlockedWindow":
        """Return the mask between queries and keys of the same contiguous tokens, for `attention_block`.

        Args:
            first: position of the first token.
            q: their queries, [S, B, A, D].
        """
        length = len(q)
        if not self.needs_mask(length):
            return "causal"
        if BlockedWindow.suits(q, self.window, self.document_starts):
            starts = None if self.document_starts is None else self.document_starts[first : first + length] - first
            return BlockedWindow(self.window, starts)
        positions = torch.arange(first, first + length, device=q.device)
        return self.mask(positions, positions)

    def in_window(self, distance: int) -> bool:
        """Return whether a key this many positions before a query is in its window, regardless of documents."""
        return not self.window or distance < self.window

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the boolean attention mask, True where a query attends to a key.

        Args:
            queries: positions of the queries, int64 [Sq], on the device of `document_starts`.
            keys: positions of the keys, int64 [Sk].

        Returns:
            bool [B, Sq, Sk]; [1, Sq, Sk] where all samples are alike. A row may be empty.
        """
        first_SB = queries[:, None] if self.document_starts is None else self.document_starts[queries]
        if self.window:
            window_start_S1 = queries[:, None] - (self.window - 1)
            first_SB = window_start_S1 if self.document_starts is None else torch.maximum(first_SB, window_start_S1)
        elif self.document_starts is None:
            first_SB = torch.zeros_like(first_SB)
        return (keys >= first_SB.t()[:, :, None]) & (keys <= queries[:, None])


class SelfAttention(nn.Module, ABC):
    """Base class of the attention of a layer; head counts follow the local weights.

    `parallelize` replaces `sequence_parallel` (sequence parallelism), `core_attention` (context parallelism),
    `wgrad_store` (backward pass split in two) and `kernels`.

    Args:
        window: sliding window: most keys that a query attends to, its own included; 0: no limit.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.sequence_parallel: SequenceParallel = NoSequenceParallel()
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self.window = window
        self.core_attention: CoreAttention = CausalAttention(window)

    @abstractmethod
    def forward(self, x: Tensor, rope: Rope, document_starts: Tensor | None = None) -> Tensor:
        """Compute self-attention over the whole sequence.

        Args:
            x: [S/(cp*tp), B, H].
            rope: of the positions of this rank's context shard, S/cp tokens.
            document_starts: see `CoreAttention`, int64 [S, B].

        Returns:
            [S/(cp*tp), B, H].
        """


class Attention(SelfAttention):
    """Grouped-query attention: QKV projections, RoPE, core attention, output projection.

    `parallelize` also sets `kv_rows`, the rows of wk and wv for this rank's query heads, where tp exceeds the number of
    query groups.

    Args:
        cfg: sizes, norms, biases and sinks.
        window: sliding window: most keys that a query attends to, its own included; 0: no limit.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0) -> None:
        super().__init__(window)
        head = cfg.head_size
        hidden = cfg.hidden_size
        query = cfg.num_attention_heads * head
        key_value = cfg.num_query_groups * head
        self.head_size = head
        self.wq = nn.Parameter(torch.empty(query, hidden))
        self.wk = nn.Parameter(torch.empty(key_value, hidden))
        self.wv = nn.Parameter(torch.empty(key_value, hidden))
        self.wo = nn.Parameter(torch.empty(hidden, query))
        self.bq = nn.Parameter(torch.empty(query)) if cfg.qkv_bias else None
        self.bk = nn.Parameter(torch.empty(key_value)) if cfg.qkv_bias else None
        self.bv = nn.Parameter(torch.empty(key_value)) if cfg.qkv_bias else None
        self.bo = nn.Parameter(torch.empty(hidden)) if cfg.attention_output_bias else None
        self.sinks = nn.Parameter(torch.empty(cfg.num_attention_heads)) if cfg.attention_sinks else None
        self.query_norm = _head_norm(cfg, query)
        self.key_norm = _head_norm(cfg, key_value)
        self.kv_rows = slice(None)

    def forward(self, x: Tensor, rope: Rope, document_starts: Tensor | None = None) -> Tensor:
        """Compute grouped-query attention, as `SelfAttention.forward`."""
        columns = [
            self._shard_of(self.wq, self.bq, slice(None), x.dtype),
            self._shard_of(self.wk, self.bk, self.kv_rows, x.dtype),
            self._shard_of(self.wv, self.bv, self.kv_rows, x.dtype),
        ]
        projected = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store, self.kernels.linear_backend)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in projected)
        query, key = self._normalize_and_rotate(query, key, rope)
        sinks = None if self.sinks is None else local_param(self.sinks, x.dtype)
        attended = self.core_attention(query, key, value, document_starts, sinks)
        wo = local_param(self.wo, x.dtype)
        out = self.sequence_parallel.linear_reduce_scatter(
            attended.flatten(2), wo, self.wgrad_store, self.kernels.linear_backend
        )
        return out if self.bo is None else out + local_param(self.bo, x.dtype)

    def _normalize_and_rotate(self, query: Tensor, key: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Apply QK norm, if there is one, and RoPE to [S, B, heads, D] each."""
        if isinstance(self.query_norm, FullWidthQKNorm) and isinstance(self.key_norm, FullWidthQKNorm):
            query = self.query_norm(query, slice(None))
            key = self.key_norm(key, self.kv_rows)
        elif isinstance(self.query_norm, RMSNorm) and isinstance(self.key_norm, RMSNorm):
            if self.kernels.qk_norm_rope is not None:
                weights = self.query_norm.local_weight(query), self.key_norm.local_weight(key)
                return self.kernels.qk_norm_rope(
                    query,
                    key,
                    weights,
                    self.query_norm.eps,
                    (rope.cos, rope.sin),
                    is_interleaved=rope.is_interleaved,
                )
            query = self.query_norm(query)
            key = self.key_norm(key)
        return rope(query), rope(key)

    @staticmethod
    def _shard_of(
        weight: Tensor, bias: Tensor | None, weight_rows: slice, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of this rank's heads."""
        weight = local_param(weight, dtype)
        bias = None if bias is None else local_param(bias, dtype)
        if weight_rows == slice(None):
            # A slice of everything would cost its backward pass a tensor of zeros and a copy.
            return weight, bias
        return weight[weight_rows], None if bias is None else bias[weight_rows]


def _head_norm(cfg: ModelConfig, width: int) -> nn.Module | None:
    if not cfg.qk_norm:
        return None
    if cfg.qk_norm_width == "all_heads":
        return FullWidthQKNorm(width, cfg.norm_eps)
    return RMSNorm(cfg.head_size, cfg.norm_eps)


MIN_LONG_DOCUMENT_TOKENS = 256
"""Mean tokens of a document from which a CPU is faster with one call a document than with a mask (docs/log.md)."""


class CoreAttention(Protocol):
    """Attention over all tokens of the samples; this rank may hold a context shard of them."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute softmax attention.

        Args:
            q: queries, [S, B, A, D], any strides; S, A and G are this rank's own.
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].
            document_starts: position at which the document of each token begins, int64 [S, B], of the *whole* sample on
                every rank; None: a sample is one document.
            sinks: a logit for each query head that takes part in the softmax, [A]; see `fold_in_sinks`.

        Returns:
            [S, B, A, D].
        """
        ...


class CausalAttention:
    """Scaled dot-product attention with a causal mask (arXiv:1706.03762 sec. 3.2.1).

    Query heads share key/value heads in groups (arXiv:2305.13245): head a reads key/value head a // (A/G).
    Local: no communication, no parameters. `parallelize` sets `kernel`, used where it supports the tensors.

    Args:
        window: sliding window: most keys that a query attends to, its own included; 0: no limit.
    """

    def __init__(self, window: int = 0) -> None:
        self._window = window
        self.kernel: CausalKernel | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention.

        Args:
            q: queries, [S, B, A, D], any strides.
            k: keys, [S, B, G, D]; G divides A.
            v: values, [S, B, G, D].
            document_starts: see `CoreAttention`; likewise `sinks`.

        Returns:
            [S, B, A, D]; from SDPA, a view of a tensor whose outermost dim is the batch.
        """
        if (
            document_starts is not None
            and sinks is None
            and not 0 < self._window < len(q)
            and _has_long_documents(document_starts)
        ):
            return _attend_per_document(q, k, v, document_starts, self.kernel)
        block_mask = AttentionMaskSpec(self._window, document_starts).local_mask(0, q)
        mask = None
        if sinks is not None or isinstance(block_mask, BlockedWindow):
            return _BlockAttention.apply(
                q, k, v, sinks, block_mask, _supported_kernel(self.kernel, block_mask, q, k, v)
            )
        if isinstance(block_mask, Tensor):
            mask = block_mask.unsqueeze(1)
        return _attend(q, k, v, mask, self.kernel)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: CausalKernel | None) -> Tensor:
    """Call `kernel`, where it supports the tensors, else SDPA, on [S, B, heads, D]; causal without a mask."""
    block_mask: BlockMask = "causal" if mask is None else mask.squeeze(1)
    kernel = _supported_kernel(kernel, block_mask, q, k, v)
    if kernel is not None or is_faster_in_fp32(q):
        # Upcasts inside both passes, so that the saved tensors stay in bfloat16.
        y: Tensor = _BlockAttention.apply(q, k, v, None, block_mask, kernel)
        return y
    # enable_gqa makes SDPA read each key/value head in place, without a copy for its A/G query heads. With equal head
    # counts it would only rule out kernels.
    out = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.permute(2, 0, 1, 3)


def _supported_kernel(
    kernel: CausalKernel | None, block_mask: BlockMask, q: Tensor, k: Tensor, v: Tensor
) -> CausalKernel | None:
    """Return the kernel if it supports these tensors and this mask, else None."""
    is_causal = isinstance(block_mask, str) and block_mask == "causal"
    return kernel if kernel is not None and is_causal and kernel.supports(q, k, v) else None


def _has_long_documents(document_starts: Tensor) -> bool:
    """Return whether one attention call a document is faster; False on a GPU, where asking would synchronise."""
    return (
        document_starts.device.type == "cpu"
        and MIN_LONG_DOCUMENT_TOKENS * int(_is_document_start(document_starts).sum()) <= document_starts.numel()
    )


def _is_document_start(document_starts: Tensor) -> Tensor:
    return document_starts == torch.arange(len(document_starts), device=document_starts.device)[:, None]


def _attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, kernel: CausalKernel | None
) -> Tensor:
    """Compute causal attention document by document, so that no masked score is computed."""
    samples = []
    for is_start_S, *sample in zip(
        _is_document_start(document_starts).t(), *(x.split(1, dim=1) for x in (q, k, v)), strict=True
    ):
        bounds = [*is_start_S.nonzero().flatten().tolist(), len(q)]
        lengths = [stop - start for start, stop in pairwise(bounds)]
        queries, keys, values = (x.split(lengths) for x in sample)
        documents = zip(queries, keys, values, strict=True)
        samples.append(torch.cat([_attend(*document, None, kernel) for document in documents]))
    return torch.cat(samples, dim=1)


class _BlockAttention(torch.autograd.Function):
    """Attention with a kernel or in blocks: q [S, B, A, D], k and v [S, B, G, D], sinks [A] or None -> [S, B, A, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        block_mask: BlockMask,
        kernel: BlockKernel | None,
    ) -> Tensor:
        block = attention_block(q, k, v, block_mask=block_mask) if kernel is None else kernel.forward(q, k, v, "causal")
        out, lse = fold_in_sinks(*block, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.block_mask = block_mask
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        saved = grad_out, q, k, v, out, lse
        if ctx.kernel is None:
            gradients = attention_block_backward(*saved, block_mask=ctx.block_mask)
        else:
            gradients = ctx.kernel.backward(*saved, "causal")
        return *gradients, sink_gradient(grad_out, out, lse, sinks), None, None
