"""Attention of rows to their pages of a cache (ops/paged_attention.py) on a CPU in C, without autograd.

The reference is `ops.cpu.attention.CAttention`. A row has the bits that the reference computes for its token, for any
other rows: both kernels have the same tiles, exponentials and order of all sums.
"""

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.ops.cpu.attention import MAX_HEAD_DIM, TOLERANCES, CAttention
from moefold.ops.cpu.build import (
    NUMBER,
    SIZE,
    CompilerError,
    address_of,
    declare,
    load_library,
    pointer_fields,
    size_fields,
)
from moefold.ops.expert_ops import unit_stride
from moefold.ops.paged_attention import new_pages, write_pages

SELF_TEST_LENGTHS = (7, 64, 150)
"""Tokens of the samples of the self-test: several pages, and not a multiple of a page."""


class _QueriesStruct(ctypes.Structure):
    """C struct `query_view`: address of [rows, heads, D], strides of the first two dims in elements, and dtype."""

    _fields_ = (*pointer_fields("start"), *size_fields("row", "head", "is_bfloat16"))


class _CacheStruct(ctypes.Structure):
    """C struct `paged_cache`."""

    _fields_ = (
        *pointer_fields("keys", "values"),
        *size_fields("is_bfloat16", "groups"),
        *pointer_fields("table"),
        *size_fields("table_width"),
        *pointer_fields("lengths"),
        *size_fields("window"),
        *pointer_fields("sinks"),
    )


class CPagedAttention:
    """Attention to pages of float32 or bfloat16, computed in float32.

    Args:
        attention: the kernel of training. The self-test compares every bit with it.
    """

    def __init__(self, attention: CAttention) -> None:
        library = load_library("paged_attention")
        assert library.paged_attention_page_size() == PAGE_POSITIONS, library.paged_attention_page_size()
        self._attend = declare(
            library.paged_attention, _QueriesStruct, _QueriesStruct, _CacheStruct, *[SIZE] * 3, NUMBER
        )
        self._self_test(attention)

    def supports(self, q_RAD: Tensor, k_RGD: Tensor, v_RGD: Tensor) -> bool:
        """Return whether the kernel supports a cache of such keys and values. It depends on shapes and dtypes only."""
        return (
            all(x.is_cpu and x.dtype == q_RAD.dtype in TOLERANCES for x in (q_RAD, k_RGD, v_RGD))
            and k_RGD.shape == v_RGD.shape
            and 0 < q_RAD.shape[-1] == k_RGD.shape[-1] <= MAX_HEAD_DIM
            and q_RAD.shape[1] % k_RGD.shape[1] == 0
        )

    def __call__(
        self,
        q_RAD: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax attention, with scores divided by sqrt(D).

        Args:
            q_RAD: queries, [R, A, D]. Head a reads key/value head a // (A/G).
            key_pages: [P, G, D, N], contiguous.
            value_pages: [P, G, N, D], contiguous.
            page_table: pages of each row, int32 [R, pages], contiguous.
            lengths: keys that a row attends to, its own included, int32 [R], each at least 1. The cache has them.
            window: sliding window: maximum keys of a row, its own included. 0: no limit. Pages before it are not read.
            sinks: a logit of each head that takes part in the softmax, [A]. See `fold_in_sinks`.

        Returns:
            [R, A, D], in the dtype of the queries.
        """
        rows, heads, d = q_RAD.shape
        num_pages, groups = key_pages.shape[:2]
        # The C code has no bounds checks.
        assert key_pages.shape == (num_pages, groups, d, PAGE_POSITIONS), key_pages.shape
        assert value_pages.shape == (num_pages, groups, PAGE_POSITIONS, d), value_pages.shape
        assert key_pages.is_contiguous(), key_pages.stride()
        assert value_pages.is_contiguous(), value_pages.stride()
        assert q_RAD.dtype == key_pages.dtype == value_pages.dtype, (q_RAD.dtype, key_pages.dtype, value_pages.dtype)
        assert heads % groups == 0, (heads, groups)
        assert page_table.dtype == lengths.dtype == torch.int32, (page_table.dtype, lengths.dtype)
        assert page_table.is_contiguous(), page_table.stride()
        assert len(page_table) == len(lengths) == rows, (page_table.shape, lengths.shape, rows)
        q_RAD = unit_stride(q_RAD)
        out = q_RAD.new_empty(rows, heads, d)
        if rows == 0:
            return out
        assert int(lengths.min()) > 0, lengths
        assert int(lengths.max()) <= page_table.shape[1] * PAGE_POSITIONS, (lengths, page_table.shape)
        lengths = lengths.contiguous()
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        cache = _CacheStruct(
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            q_RAD.dtype == torch.bfloat16,
            groups,
            page_table.data_ptr(),
            page_table.shape[1],
            lengths.data_ptr(),
            window,
            address_of(wide_sinks),
        )
        queries = _to_queries_struct(q_RAD), _to_queries_struct(out)
        self._attend(*queries, cache, rows, heads, d, torch.get_num_threads())
        return out

    def _self_test(self, attention: CAttention) -> None:
        """Compare every bit with the kernel of training, to catch compilers that change the order of operations.

        Raises:
            CompilerError: bits differ.
        """
        tokens, heads, groups, d = max(SELF_TEST_LENGTHS), 4, 2, 24
        samples = len(SELF_TEST_LENGTHS)
        q, k, v = (
            torch.linspace(low, 1, tokens * samples * count * d).sin().view(tokens, samples, count, d)
            for low, count in ((-2, heads), (-3, groups), (4, groups))
        )
        pages_each = -(-tokens // PAGE_POSITIONS)
        page_table = torch.arange(samples * pages_each, dtype=torch.int32).view(samples, pages_each)
        position = torch.arange(tokens)
        for dtype in TOLERANCES:
            q_SBAD, k_SBGD, v_SBGD = (x.to(dtype) for x in (q, k, v))
            pages = new_pages(samples * pages_each, groups, d, q_SBAD)
            for sample in range(samples):
                page_R = page_table[sample].long()[position // PAGE_POSITIONS]
                write_pages(*pages, k_SBGD[:, sample], v_SBGD[:, sample], page_R, position % PAGE_POSITIONS)
            expected, _ = attention.forward(q_SBAD, k_SBGD, v_SBGD, "causal")
            lengths = torch.tensor(SELF_TEST_LENGTHS, dtype=torch.int32)
            sample_R = torch.arange(samples)
            ends = lengths.long() - 1
            decoded = self(q_SBAD[ends, sample_R], *pages, page_table, lengths)
            is_equal = torch.equal(decoded, expected[ends, sample_R])
            for start, stop in pairwise((0, 5, 70, tokens)):
                rows = stop - start
                counts = torch.arange(start + 1, stop + 1, dtype=torch.int32)
                table = page_table[:1].expand(rows, -1).contiguous()
                is_equal &= torch.equal(self(q_SBAD[start:stop, 0], *pages, table, counts), expected[start:stop, 0])
            if not is_equal:
                raise CompilerError("the compiled paged attention kernel has other bits than the attention kernel")


def _to_queries_struct(x_RAD: Tensor) -> _QueriesStruct:
    return _QueriesStruct(x_RAD.data_ptr(), *x_RAD.stride()[:2], x_RAD.dtype == torch.bfloat16)
