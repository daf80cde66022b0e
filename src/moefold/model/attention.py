"""Base classes of the attention of a layer, and causal softmax attention within documents and windows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moefold.config.groups.attention import AttentionCore
from moefold.model.delayed_wgrad import WeightGradStoreProtocol
from moefold.model.kernels import TORCH_KERNELS, Kernels
from moefold.model.lora import LowRankAdapters
from moefold.model.tp_interface import SequenceParallel
from moefold.ops.autotune import Autotuner
from moefold.ops.block_attention import (
    BlockedWindow,
    BlockMask,
    CausalKernel,
    CudaFlash,
    FlashMask,
    additive_mask,
    attention_block,
    attention_block_backward,
    causal_sdpa,
    fold_in_sinks,
    is_causal,
    scale_queries,
    sink_gradient,
)
from moefold.ops.decode import HeadWeights
from moefold.ops.documents import AttentionChunks, PackedDocuments
from moefold.ops.elementwise import sigmoid
from moefold.ops.gemm import is_faster_in_fp32
from moefold.ops.rope import NoRope, Rope

if TYPE_CHECKING:
    from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache
    from moefold.ops.cpu.attention import CAttention


@dataclass(frozen=True)
class AttentionMaskSpec:
    """Limits of a query's context in addition to causality. Positions refer to the whole sample.

    A query at position p attends to the keys at f .. p, f = max(start of its document, p - window + 1). Documents are
    contiguous, so the start of the query's document suffices, and no mask data is sent with the keys.
    """

    window: int = 0
    """Sliding window: maximum number of keys of a query, its own included. 0: no limit."""
    documents: PackedDocuments | None = None
    """Documents of the whole samples, or None if a sample is one document."""

    def needs_mask(self, seq_len: int) -> bool:
        """Return whether these limits may mask causal keys of a sample of this length."""
        return 0 < self.window < seq_len or (self.documents is not None and self.documents.divide(0, seq_len))

    def local_mask(
        self, first: int, q: Tensor, *, takes_limits: bool = False
    ) -> "Literal['causal'] | Tensor | BlockedWindow | FlashMask":
        """Return the mask between queries and keys of the same contiguous tokens, for `attention_block`.

        Args:
            q: their queries, [S, B, A, D].
            takes_limits: the caller's kernel takes a `FlashMask`.
        """
        length = len(q)
        documents = self.documents
        if documents is not None and not documents.divide(first, length):
            documents = None
        if documents is None and not 0 < self.window < length:
            return "causal"
        if takes_limits or CudaFlash.supports(q):
            return FlashMask(True, self.window - 1, None if documents is None else documents.segments(first, length))
        if q.device.type != "cuda" and BlockedWindow.is_worthwhile(self.window, length):
            starts = None if documents is None else documents.starts_SB[first : first + length] - first
            return BlockedWindow(self.window, starts)

        def build() -> Tensor:
            positions = torch.arange(first, first + length, device=q.device)
            return replace(self, documents=documents).mask(positions, positions)

        return build() if documents is None else documents.cached(("mask", self.window, first, length), build)

    def additive_mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a local mask as an addend of the scores, [B or 1, 1, S, S]: 0, or -inf for a masked key.

        SDPA saves it for backward. With documents, the layers share it.
        """
        build = partial(additive_mask, mask, dtype)
        return build() if self.documents is None else self.documents.cached((dtype, self.window, mask.shape), build)

    def past_mask(self, queries: range, keys: range, q: Tensor) -> "Literal['all'] | Tensor | FlashMask":
        """Return the mask between queries and earlier keys of the same documents, for `attention_block`.

        Args:
            keys: positions of the keys. The last query attends to the last of them.
        """
        if self.in_window(queries[-1] - keys[0]):
            return "all"
        if CudaFlash.supports(q):
            window_left = self.window - 1 - (queries[-1] - keys[-1])
            assert window_left >= 0, "the last query attends to no key, and the kernel reads -1 as no limit"
            return FlashMask(False, window_left)
        positions = (torch.arange(x.start, x.stop, device=q.device) for x in (queries, keys))
        return AttentionMaskSpec(self.window).mask(*positions)

    def in_window(self, distance: int) -> bool:
        """Return whether a key this many positions before a query is in its window, regardless of documents."""
        return not self.window or distance < self.window

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the boolean attention mask, True where a query attends to a key.

        Args:
            queries: positions of the queries, int64 [Sq], on the device of the documents.
            keys: positions of the keys, int64 [Sk].

        Returns:
            bool [B, Sq, Sk], or [1, Sq, Sk] where all samples have the same mask. A row may be empty.
        """
        first_SB = torch.zeros_like(queries)[:, None] if self.documents is None else self.documents.starts_SB[queries]
        if self.window:
            first_SB = torch.maximum(first_SB, queries[:, None] - (self.window - 1))
        return (keys >= first_SB.t()[:, :, None]) & (keys <= queries[:, None])


class TokenMixer(nn.Module, ABC):
    """Base class of the attention of a layer, softmax or linear. Head counts follow the local weights.

    `parallelize` replaces `sequence_parallel` (sequence parallelism), `wgrad_store` (backward pass split in two) and
    `kernels`.
    """

    selects_keys: ClassVar[bool] = False
    """True if each query attends to selected keys: `forward` then takes a `Selection`."""
    fused_refusal: ClassVar[str] = "a layer of another class"
    """Reason why no kernel for whole layers computes this class, or "" if a kernel does, see `fused_block.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence_parallel: SequenceParallel = SequenceParallel()
        self.wgrad_store: WeightGradStoreProtocol | None = None
        self.kernels: Kernels = TORCH_KERNELS
        self.lora: LowRankAdapters | None = None

    @abstractmethod
    def forward(self, x: Tensor, rope: Rope | NoRope, documents: PackedDocuments | None = None) -> Tensor:
        """Compute attention over the whole sequence.

        Args:
            x: [S/(cp*tp), B, H].
            rope: RoPE of the S/cp tokens of this rank's context shard, or `NoRope` in a layer without RoPE.

        Returns:
            [S/(cp*tp), B, H].
        """

    @abstractmethod
    def open_caches(self, current_pass: "CurrentPass", size: "CacheSize") -> "list[LayerCache]":
        """Attend to earlier tokens through new caches until `close_caches`, for generation, and return the caches."""

    @abstractmethod
    def close_caches(self) -> None:
        """Attend to the tokens of each pass only, as before `open_caches`. Without caches it has no effect."""

    def set_tp_rank(self, rank: int, tp: int) -> None:
        """Set this rank's number among the `tp` ranks that share the heads, without effect if no ranks share heads."""

    def fused_obstacles(self) -> Iterator[tuple[str, bool]]:
        """Yield further reasons against that kernel and whether each holds. A check may rely on earlier checks."""
        yield from ()

    def fused_weights(self, like: Tensor) -> HeadWeights:
        """Return the weights for rows of the dtype of a tensor, where no `fused_obstacles` hold."""
        raise NotImplementedError


class SelfAttention(TokenMixer):
    """Base class of softmax attention.

    `parallelize` also replaces `core_attention` and `attends_in_blocks` (context parallelism).
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.chunk_size = 0
        self.core_attention: CoreAttention = CausalAttention(window)
        self._core_without_cache: CoreAttention | None = None
        self.attends_in_blocks = False

    def open_caches(self, current_pass: "CurrentPass", size: "CacheSize") -> "list[LayerCache]":
        """Attend to the keys and values of the pages of each row's sample, as the base class says."""
        from moefold.model.paged_cache import KeyLimits, PagedAttention

        limits = KeyLimits(self.window, self.chunk_size)
        kernels = self.kernels.paged_attention, self.kernels.page_reader
        cache = PagedAttention(current_pass, size.num_pages, size.page_positions, limits, *kernels)
        self.attend_by(cache)
        return [cache]

    def attend_by(self, cache: "CoreAttention") -> None:
        """Replace `core_attention` until `close_caches`."""
        assert self._core_without_cache is None, "caches are open already; close_caches() comes first"
        self._core_without_cache, self.core_attention = self.core_attention, cache

    def close_caches(self) -> None:
        """Restore `core_attention`. See base class."""
        if self._core_without_cache is not None:
            self.core_attention, self._core_without_cache = self._core_without_cache, None

    def head_sizes(self, core: AttentionCore, device: torch.device) -> tuple[int, int]:
        """Return the dims of a key and of a value in core attention on a device, given the sizes of the layer."""
        return core.key_width, core.value_width

    def limit_to_chunks(self, chunk_size: int) -> None:
        """Let each token attend within its chunk of `chunk_size` tokens of its document. 0: no chunks."""
        self.chunk_size = chunk_size
        self.core_attention = CausalAttention(self.window, chunk_size)


def gate_heads(attended_SBAD: Tensor, gate: Tensor) -> Tensor:
    """Multiply the heads by the sigmoid of gates, [S, B, A * D] of each dim or [S, B, A] of each head."""
    return attended_SBAD * sigmoid(gate.unflatten(-1, (attended_SBAD.shape[2], -1)))


MIN_LONG_DOCUMENT_TOKENS = 256
"""Mean document length from which one call for each document is faster on a CPU than a mask
(docs/log.md#2026-11-20-what-documents-windows-and-sinks-cost-in-attention)."""


class CoreAttention(Protocol):
    """Attention over all tokens of the samples. This rank may hold a context shard of them."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Compute softmax attention.

        Args:
            q: queries, [S, B, A, D], any strides. S, A and G are this rank's own.
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].
            documents: documents of the *whole* samples on every rank, or None if a sample is one document.
            sinks: a logit for each query head that takes part in the softmax, [A]. See `fold_in_sinks`.
            scale: factor of the scores. None means 1/sqrt(D).

        Returns:
            [S, B, A, D].
        """


def sdpa_supports_narrow_values(device: torch.device) -> bool:
    """Return whether SDPA has kernels for values with fewer dims than the keys. On a CPU, padding them is faster."""
    return device.type == "cuda"


class CausalAttention:
    """Scaled dot-product attention with a causal mask (arXiv:1706.03762 sec. 3.2.1).

    Query heads share key/value heads in groups (arXiv:2305.13245): head a reads key/value head a // (A/G). Local: no
    communication, no parameters. `parallelize` sets `kernel`, used where it supports the tensors, `block_kernel`, used
    in the same way for causal attention with sinks, and `tuner`, which chooses the backend of SDPA.
    """

    def __init__(self, window: int = 0, chunk_size: int = 0) -> None:
        self._window = window
        self._chunks = AttentionChunks(chunk_size)
        self.kernel: CAttention | None = None
        self.block_kernel: CausalKernel | None = None
        self.tuner: Autotuner | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend as a `CoreAttention`. G divides A. SDPA returns a view of a tensor with the batch outermost."""
        documents = self._chunks.divide(documents, len(q), q.shape[1], q.device)
        if (
            documents is not None
            and sinks is None
            and not 0 < self._window < len(q)
            and not self._has_kernel_for(q, k, v)
            and has_long_documents(documents, q)
        ):
            return self._attend_per_document(scale_queries(q, scale), k, v, documents)
        return self._attend(q, k, v, AttentionMaskSpec(self._window, documents), sinks, scale)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask_spec: AttentionMaskSpec,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend by `kernel` if that supports the tensors, else by a kernel for blocks or SDPA, on [S, B, heads, D]."""
        takes_limits = self._has_kernel_for(q, k, v)
        block_mask = mask_spec.local_mask(0, q, takes_limits=takes_limits)
        kernel: CAttention | CausalKernel | None = self.kernel if takes_limits else None
        blocks = self.block_kernel
        if sinks is not None and kernel is None and blocks is not None and is_causal(block_mask):
            kernel = blocks if blocks.supports(q, k, v) else None
        # In bfloat16 on a CPU, blocks upcast inside both passes, so that the saved tensors stay in bfloat16.
        if (
            sinks is not None
            or kernel is not None
            or isinstance(block_mask, BlockedWindow | FlashMask)
            or is_faster_in_fp32(q)
        ):
            return _BlockAttention.apply(scale_queries(q, scale), k, v, sinks, block_mask, kernel, takes_limits)
        mask = mask_spec.additive_mask(block_mask, q.dtype) if isinstance(block_mask, Tensor) else None
        if mask is None and self.tuner is not None:
            from moefold.ops.measured_attention import measured_causal_sdpa

            return measured_causal_sdpa(self.tuner, q, k, v, scale)
        return causal_sdpa(q, k, v, scale, mask)

    def _has_kernel_for(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether `kernel` supports these tensors, and so every document, window and sink."""
        return self.kernel is not None and self.kernel.supports(q, k, v)

    def _attend_per_document(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments) -> Tensor:
        """Compute causal attention document by document, so that no masked score is computed."""
        samples = []
        for bounds, *sample in zip(documents.bounds.of_samples, *(x.split(1, dim=1) for x in (q, k, v)), strict=True):
            lengths = [stop - start for start, stop in pairwise(bounds)]
            queries, keys, values = (x.split(lengths) for x in sample)
            documents_qkv = zip(queries, keys, values, strict=True)
            samples.append(torch.cat([self._attend(*qkv, AttentionMaskSpec()) for qkv in documents_qkv]))
        return torch.cat(samples, dim=1)


def has_long_documents(documents: PackedDocuments, q: Tensor) -> bool:
    """Return whether one attention call for each document is faster than a mask, which is so only on a CPU."""
    num_documents = sum(len(bounds) - 1 for bounds in documents.bounds.of_samples)
    return q.device.type == "cpu" and MIN_LONG_DOCUMENT_TOKENS * num_documents <= q.shape[0] * q.shape[1]


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
        kernel: Any,
        takes_limits: bool = False,
    ) -> Tensor:
        if takes_limits:
            out, lse = kernel.forward(q, k, v, block_mask, sinks)
        elif kernel is None:
            out, lse = fold_in_sinks(*attention_block(q, k, v, block_mask=block_mask), sinks)
        else:
            block_out, block_lse = kernel.forward(q, k, v, "causal")
            out, lse = fold_in_sinks(block_out, block_lse, sinks)
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
            gradients = ctx.kernel.backward(*saved, ctx.block_mask)
        return *gradients, sink_gradient(grad_out, out, lse, sinks), None, None, None
