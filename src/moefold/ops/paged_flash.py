"""Attention of a pass to the pages of a cache by torch's flash attention on CUDA, which reads them by a block table.

The operator reads pages [P, positions, G, D] for segments of any numbers of rows: chunks of prompts and single tokens
together. Its argument is newer than torch 2.11, where pages are gathered. torch 2.11 has FlexAttention's
`PagedAttention`, which is experimental. Inductor would compile it in the first passes of every process.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
from torch import Tensor
from torch.nn import attention

from moefold.comm.private_torch import cuda_flash_attention, cuda_flash_attention_reads_pages
from moefold.cost.kv_cache import CUDA_PAGE_POSITIONS
from moefold.message_text import first_line
from moefold.ops.block_attention import (
    PROBE_LSE_TOLERANCE,
    PROBE_TOLERANCE,
    CudaFlash,
    MathBlockAttention,
    fold_in_sinks,
)
from moefold.ops.paged_attention import PageSegments

PROBE_SEGMENTS = (((5, 300), (1, 70), (130, 600)), ((1, 257), (1, 3)))
"""Rows and keys of the segments of each pass of the probe: with chunks of prompts, and with single tokens only."""
PROBE_WINDOW = 100


class FlashPages:
    """Attention to pages by flash attention, without autograd, for bfloat16 and float16.

    Args:
        fixed_order: whether the keys of a row are added in an order that does not depend on the other rows, which is
            slower for few rows with many keys.
    """

    def __init__(self, *, fixed_order: bool = False) -> None:
        self._fixed_order = fixed_order

    def unsupported_reason(self, q_RAD: Tensor, k_RGD: Tensor, v_RGD: Tensor, page_positions: int) -> str:
        """Return the reason why the kernel does not read a cache of such keys and values, or "" if it does."""
        if not CudaFlash.supports(q_RAD):
            return f"flash attention does not take heads of {q_RAD.shape[-1]} in {q_RAD.dtype}"
        if k_RGD.shape != v_RGD.shape:
            return f"flash attention takes no values of {v_RGD.shape[-1]} with keys of {k_RGD.shape[-1]}"
        if page_positions % CUDA_PAGE_POSITIONS:
            return f"pages of {page_positions} positions are not a multiple of {CUDA_PAGE_POSITIONS}"
        return device_refusal(q_RAD.device)

    def __call__(
        self,
        q_RAD: Tensor,
        pages: tuple[Tensor, Tensor],
        segments: PageSegments,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute softmax attention, with scores divided by sqrt(D). It does not communicate.

        Args:
            q_RAD: queries, [R, A, D]. Head a reads key/value head a // (A/G).
            pages: pages of keys and of values, [P, positions, G, D], which include the keys of the rows.
            window: sliding window: maximum keys of a row, its own included. 0: no limit.
            sinks: a logit of each head that takes part in the softmax, [A]. See `fold_in_sinks`.

        Returns:
            [R, A, D], in the dtype of the queries.
        """
        return fold_in_sinks(*self.with_log_sum(q_RAD, pages, segments, window), sinks)[0]

    def with_log_sum(
        self, q_RAD: Tensor, pages: tuple[Tensor, Tensor], segments: PageSegments, window: int
    ) -> tuple[Tensor, Tensor]:
        """Return the output [R, A, D] and the log-sum-exp over the keys, [R, A]. See `__call__`."""
        # Without a limit the kernel reads keys once for all heads of single rows. A last row sees all keys.
        is_limited = window > 0 or segments.most_rows > 1
        # Other implementations of torch's registry do not accept the places of keys in pages.
        has_other = attention.current_flash_attention_impl() is not None
        options = {"num_splits": 1} if self._fixed_order else {}
        out, lse_AR, *_ = cuda_flash_attention()(
            q_RAD,
            *pages,
            segments.starts,
            None if has_other else segments.key_starts,
            segments.most_rows,
            segments.most_keys,
            0.0,
            is_limited,
            False,
            window_size_left=window - 1 if window else -1,
            window_size_right=0 if is_limited else -1,
            seqused_k=segments.key_counts_N,
            block_table=segments.tables_NP,
            **options,
        )
        return out, lse_AR.t()


@cache
def device_refusal(device: torch.device) -> str:
    """Return the reason why flash attention cannot read pages on a device, "" if it can. The first call tests it."""
    if not cuda_flash_attention_reads_pages():
        return f"flash attention of torch {torch.__version__} takes no block table"
    return find_disagreement(device)


def find_disagreement(device: torch.device) -> str:
    """Compare attention to small pages with the definition, and return how it differs, "" if it agrees."""
    kernel = FlashPages()
    for (number, sizes), window in product(enumerate(PROBE_SEGMENTS), (0, PROBE_WINDOW)):
        name = f"pass {number}, window {window}"
        case = probe_case(sizes, device)
        try:
            out, lse = kernel.with_log_sum(*case, window)
        except (RuntimeError, TypeError) as error:
            return f"flash attention over pages raises {first_line(error)!r} ({name})"
        exact_out, exact_lse = (torch.cat(tensors) for tensors in zip(*exact_segments(*case, window), strict=True))
        out_error = float((out.double() - exact_out).abs().max() / exact_out.abs().max())
        lse_error = float((lse - exact_lse).abs().max()) if lse.shape == exact_lse.shape else float("inf")
        if not (out_error <= PROBE_TOLERANCE and lse_error <= PROBE_LSE_TOLERANCE):
            largest = max(out_error, lse_error)
            return f"flash attention over pages differs from the definition by {largest:.2g} ({name})"
    return ""


def probe_case(
    sizes: tuple[tuple[int, int], ...], device: torch.device, heads: tuple[int, int, int] = (4, 2, 64)
) -> tuple[Tensor, tuple[Tensor, Tensor], PageSegments]:
    """Return random queries, pages in a scattered order, and segments. See `FlashPages.__call__`.

    Args:
        sizes: rows and keys of each segment.
        device: device of the tensors, which are in bfloat16.
        heads: numbers of query heads and key heads, and their width.
    """
    generator = torch.Generator().manual_seed(0)
    num_heads, groups, width = heads
    rows_N, keys_N = torch.tensor(sizes, dtype=torch.int32).t().contiguous()
    pages_each = -(-int(keys_N.max()) // CUDA_PAGE_POSITIONS)
    num_pages = len(sizes) * pages_each
    tables_NP = torch.randperm(num_pages, generator=generator).view(len(sizes), pages_each).int()
    q = torch.randn(int(rows_N.sum()), num_heads, width, generator=generator)
    pages = torch.randn(2, num_pages, CUDA_PAGE_POSITIONS, groups, width, generator=generator)
    key_pages, value_pages = pages.to(device, torch.bfloat16)
    bounds = (torch.cat((x.new_zeros(1), x.cumsum(0, dtype=torch.int32))) for x in (rows_N, keys_N))
    starts, key_starts = (x.to(device) for x in bounds)
    longest = int(rows_N.max()), int(keys_N.max())
    segments = PageSegments(starts, key_starts, keys_N.to(device), tables_NP.to(device), *longest)
    return q.to(device, torch.bfloat16), (key_pages, value_pages), segments


def exact_segments(
    q_RAD: Tensor, pages: tuple[Tensor, Tensor], segments: PageSegments, window: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield output and log-sum-exp of each segment by the definition in float64. The host waits for the device."""
    starts = segments.starts.tolist()
    for number, count in enumerate(segments.key_counts_N.tolist()):
        q = q_RAD[starts[number] : starts[number + 1]].double().unsqueeze(1)
        keys, values = (x[segments.tables_NP[number]].flatten(0, 1)[:count, None].double() for x in pages)
        key_L = torch.arange(count, device=q.device)
        distance_SL = key_L[count - len(q) :, None] - key_L
        mask_SL = (distance_SL >= 0) & (distance_SL < (window or count))
        out, lse = MathBlockAttention().forward(q, keys, values, mask_SL.unsqueeze(0))
        yield out.squeeze(1), lse.squeeze(1)
