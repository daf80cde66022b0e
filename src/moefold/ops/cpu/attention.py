"""Causal attention on a CPU in C, forward and backward.

Documents, sliding windows and sinks are limits of the kernel's loops, not masks in memory: keys that a query does not
attend to are skipped, by document and by blocks. The bits of a document do not depend on its place in a sample.

Its reference is `block_attention.MathBlockAttention`. Tensors are float32 or bfloat16, computation is float32. A result
is rounded once. Gradients of keys and values are summed over the query heads that share them, in the order of the
heads, before they are rounded. Results are bitwise independent of the number of threads.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.ops.block_attention import BlockMask, FlashMask, MathBlockAttention, fold_in_sinks
from moefold.ops.cpu.build import (
    NUMBER,
    POINTER,
    SIZE,
    TensorView,
    address_of,
    check_results,
    declare,
    load_library,
    pointer_fields,
    size_fields,
)
from moefold.ops.documents import Segments
from moefold.ops.expert_ops import unit_stride

MAX_HEAD_DIM = 256
"""Maximum head dim, as in `attention.c`."""
MAX_SEQ_LEN = 16384
"""Maximum tokens of a sample, as each thread packs keys and values of a head
(docs/log.md#2026-11-25-exact-decoding-on-a-cpu)."""
MIN_FAST_VECTOR_WIDTH = 8
"""Smallest vector, in floats, for which the kernel is faster than torch's: AVX. With SSE2 it takes twice as long."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerances of the self-test, by supported dtype. A miscompiled kernel differs by more."""
SELF_TEST_SHAPE = (37, 2, 4, 2, 24)
"""Tokens, samples, query heads, key/value heads and head dim of the self-test: not multiples of vector widths."""


class _LimitsStruct(ctypes.Structure):
    """C struct `attention_limits`: documents, their queries, number of documents, longest document, window, sinks."""

    _fields_ = (
        *pointer_fields("document_ends", "query_ends"),
        *size_fields("documents", "longest", "window"),
        *pointer_fields("sinks"),
    )


class CAttention:
    """Causal attention in float32 that takes a `FlashMask` and sinks, for tensors of float32 or bfloat16."""

    def __init__(self) -> None:
        library = load_library("attention")
        shape = (_LimitsStruct, *[SIZE] * 5, NUMBER)
        self._scratch_floats = declare(library.attention_scratch_floats, SIZE, SIZE, result=SIZE)
        self._forward = declare(library.attention_forward, *[TensorView] * 4, POINTER, POINTER, *shape)
        tensors = (*[TensorView] * 5, POINTER, *[TensorView] * 3, POINTER)
        self._backward = declare(library.attention_backward, *tensors, *shape)
        self._sum_heads = declare(library.attention_sum_heads, POINTER, POINTER, *[SIZE] * 3, NUMBER, NUMBER)
        self.is_fast: bool = library.attention_vector_width() >= MIN_FAST_VECTOR_WIDTH
        self._self_test()

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether the kernel supports these tensors. It depends on shapes and dtypes only."""
        return self._supports_heads(q, k, v) and q.shape[:2] == k.shape[:2] and q.shape[0] <= MAX_SEQ_LEN

    def supports_tasks(self, q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
        """Return whether the kernel supports `FlashMask.query_segments` for tensors [rows, 1, heads, D].

        Args:
            longest: maximum number of keys of a document.
        """
        return self._supports_heads(q, k, v) and longest <= MAX_SEQ_LEN

    def _supports_heads(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return (
            all(x.is_cpu and x.dtype == q.dtype in TOLERANCES for x in (q, k, v))
            and k.shape == v.shape
            and 0 < q.shape[-1] == k.shape[-1] <= MAX_HEAD_DIM
            and k.shape[2] > 0
            and q.shape[2] % k.shape[2] == 0
            and q.numel() > 0
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse), both with the sinks.

        Args:
            q: queries, [S, B, A, D].
            k: keys, [S, B, G, D].
            v: values, [S, B, G, D].
            block_mask: "causal", or a causal `FlashMask`.
            sinks: see `fold_in_sinks`, [A].
        """
        tokens, samples, heads, _ = q.shape
        out = q.new_empty(q.shape)
        lse = q.new_empty((samples, heads, tokens), dtype=torch.float32)
        inputs = [unit_stride(x) for x in (q, k, v)]
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        limits = _to_limits_struct(block_mask, tokens, wide_sinks)
        scratch, *sizes = self._scratch_and_sizes(q, k, limits.longest)
        self._forward(*map(TensorView.of, (*inputs, out)), lse.data_ptr(), scratch.data_ptr(), limits, *sizes)
        return out, lse.permute(2, 0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block_mask: BlockMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv), given output and log-sum-exp with the sinks."""
        is_shared = k.shape[2] != q.shape[2]
        dq = q.new_empty(q.shape)
        # Gradients of shared heads are rounded after their sum.
        shape = (*k.shape[:2], *q.shape[2:])
        dk, dv = (q.new_empty(shape, dtype=torch.float32 if is_shared else q.dtype) for _ in range(2))
        inputs = [unit_stride(x) for x in (grad_out, q, k, v, out)]
        lse_BAS = lse.permute(1, 2, 0).contiguous()
        limits = _to_limits_struct(block_mask, len(q), None)
        scratch, *sizes = self._scratch_and_sizes(q, k, limits.longest)
        args = *map(TensorView.of, inputs), lse_BAS.data_ptr(), *map(TensorView.of, (dq, dk, dv))
        self._backward(*args, scratch.data_ptr(), limits, *sizes)
        if is_shared:
            dk, dv = (self._sum_shared(x, k) for x in (dk, dv))
        return dq, dk, dv

    def _sum_shared(self, x_SBAD: Tensor, like_SBGD: Tensor) -> Tensor:
        """Sum gradients of float32 over the query heads of each key/value head, and round the sums."""
        *shape, groups, d = like_SBGD.shape
        sums = like_SBGD.new_empty((*shape, groups, d))
        group = x_SBAD.shape[2] // groups
        is_bfloat16 = sums.dtype == torch.bfloat16
        self._sum_heads(
            x_SBAD.data_ptr(), sums.data_ptr(), sums.numel() // d, group, d, is_bfloat16, torch.get_num_threads()
        )
        return sums

    def _scratch_and_sizes(self, q: Tensor, k: Tensor, longest: int) -> tuple[Tensor, int, int, int, int, int, int]:
        tokens, samples, heads, d = q.shape
        threads = torch.get_num_threads()
        scratch = q.new_empty((threads * self._scratch_floats(longest, d),), dtype=torch.float32)
        return scratch, tokens, samples, heads, heads // k.shape[2], d, threads

    def _self_test(self) -> None:
        """Compare with the reference."""
        tokens, samples, heads, groups, d = SELF_TEST_SHAPE
        q, grad, k, v = (
            torch.linspace(low, 1, tokens * samples * count * d).sin().view(tokens, samples, count, d)
            for low, count in ((-2, heads), (5, heads), (-3, groups), (4, groups))
        )
        # The documents of both samples in sequence, and a window that begins inside blocks of the longest document.
        limits = FlashMask(True, 7, Segments(torch.tensor([0, 9, 37, 74], dtype=torch.int32), 37))
        sinks = torch.linspace(-1, 2, heads)
        for dtype, error in TOLERANCES.items():
            inputs = [x.to(dtype) for x in (q, k, v, grad)]
            wide = [x.double() for x in inputs]
            for mask, dense, head_sinks in (("causal", "causal", None), (limits, _dense_mask(limits, q), sinks)):
                actual = _run(self, inputs, mask, head_sinks)
                expected = _run(MathBlockAttention(), wide, dense, head_sinks)
                check_results("attention kernel", dtype, actual, expected, error)


def _run(
    kernel: "CAttention | MathBlockAttention",
    inputs: Sequence[Tensor],
    mask: Any,
    sinks: Tensor | None,
) -> tuple[Tensor, ...]:
    q, k, v, grad = inputs
    if isinstance(kernel, CAttention):
        out, lse = kernel.forward(q, k, v, mask, sinks)
    else:
        out, lse = fold_in_sinks(*kernel.forward(q, k, v, mask), sinks)
    return out, lse, *kernel.backward(grad, q, k, v, out, lse, mask)


def _dense_mask(limits: FlashMask, q: Tensor) -> Tensor:
    """Return the limits of causal attention as a mask, bool [B, S, S]."""
    assert limits.segments is not None
    tokens, samples = q.shape[:2]
    document_BS = torch.bucketize(torch.arange(samples * tokens), limits.segments.cu_seqlens, right=True)
    document_BS = document_BS.view(samples, tokens)
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions
    in_window = (distance >= 0) & (distance <= limits.window_left)
    return in_window & (document_BS[:, :, None] == document_BS[:, None, :])


def _to_limits_struct(block_mask: BlockMask, tokens: int, sinks: Tensor | None) -> _LimitsStruct:
    """Return the limits of a mask. The caller keeps its tensors and the sinks, float32 [A]."""
    address = address_of(sinks)
    if not isinstance(block_mask, FlashMask):
        assert isinstance(block_mask, str), "the kernel reads no mask"
        assert block_mask == "causal", block_mask
        return _LimitsStruct(None, None, 0, tokens, 0, address)
    assert block_mask.is_causal, "the kernel supports causal attention only"
    window = block_mask.window_left + 1
    if block_mask.segments is None:
        return _LimitsStruct(None, None, 0, tokens, window, address)
    ends = block_mask.segments.cu_seqlens
    query_ends = None if block_mask.query_segments is None else _address(block_mask.query_segments.cu_seqlens)
    return _LimitsStruct(_address(ends), query_ends, len(ends) - 1, block_mask.segments.max_length, window, address)


def _address(ends: Tensor) -> int:
    """Return the address of cumulative lengths."""
    assert ends.dtype == torch.int32, ends.dtype
    assert ends.is_contiguous(), ends.stride()
    return ends.data_ptr()
