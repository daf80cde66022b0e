"""Paged KV cache (arXiv:2309.06180): attention for passes of any tokens of any samples.

A pass is a flat batch of rows, each a token of some sample at some position: S rows, B = 1. `PagedAttention` replaces a
layer's `core_attention` and caches keys and values of this rank's heads. `PagedLatents` is the `latent_cache` of latent
attention. Keys are cached after RoPE. All rows of a pass are cached before any of them attends, so a chunk of a prompt
attends to itself.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.model.layer_cache import CurrentPass, LayerCache, PassRows
from moefold.ops.block_attention import attention_block, fold_in_sinks, scale_queries
from moefold.ops.documents import PackedDocuments

if TYPE_CHECKING:
    from moefold.ops.cpu.paged_attention import CPagedAttention
    from moefold.ops.paged_flash import FlashPages

MAX_GATHERED_ELEMENTS = 1 << 24
"""Elements of keys that are gathered from the pages at a time, 64 MiB in float32."""


class Pages:
    """Pages of one layer, allocated when its first row is cached."""

    def __init__(self, num_pages: int, page_positions: int) -> None:
        self._shape = num_pages, page_positions
        self.tensor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, or 0 before the first pass."""
        return 0 if self.tensor is None else self.tensor.nbytes

    def write(self, new_RGD: Tensor, slots_R: Tensor) -> Tensor:
        """Write rows, and return the pages, [P, positions, G, D]."""
        if self.tensor is None:
            # Zeros: a masked value is multiplied by 0, and uninitialised memory may be NaN.
            self.tensor = new_RGD.new_zeros(*self._shape, *new_RGD.shape[1:])
        self.tensor.flatten(0, 1).index_copy_(0, slots_R, new_RGD)
        return self.tensor

    def allocate(self, like: Tensor, num_groups: int, head_dim: int, *, is_transposed: bool) -> Tensor:
        """Return the pages as `CPagedAttention` reads them. The first call allocates them.

        [P, G, D, positions] of keys, which are transposed, and [P, G, positions, D] of values.
        """
        if self.tensor is None:
            num_pages, positions = self._shape
            shape = (head_dim, positions) if is_transposed else (positions, head_dim)
            self.tensor = like.new_zeros(num_pages, num_groups, *shape)
        return self.tensor

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages. A page may be source and target, and then its old contents are copied."""
        if self.tensor is not None:
            self.tensor[target] = self.tensor[source]


class PagedCache(LayerCache):
    """Cache of a layer in pages."""

    def __init__(self, current_pass: CurrentPass, num_pages: int, page_positions: int, num_tensors: int = 1) -> None:
        self._pass = current_pass
        self._pages = tuple(Pages(num_pages, page_positions) for _ in range(num_tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of the pages. See base class."""
        return sum(pages.nbytes for pages in self._pages)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy the pages of all tensors. See base class."""
        for pages in self._pages:
            pages.copy(source, target)


class PagedAttention(PagedCache):
    """Core attention over the tokens of this pass and the cached tokens of the same samples.

    Args:
        row_kernel: kernel with a page table for each row, for pages of `PAGE_POSITIONS` positions.
        segment_kernel: kernel with a page table for each segment. Both read the pages without a gather.
    """

    def __init__(
        self,
        current_pass: CurrentPass,
        num_pages: int,
        page_positions: int,
        limits: "KeyLimits | None" = None,
        row_kernel: "CPagedAttention | None" = None,
        segment_kernel: "FlashPages | None" = None,
    ) -> None:
        super().__init__(current_pass, num_pages, page_positions, 2)
        self._keys, self._values = self._pages
        self._limits = limits or KeyLimits()
        # The kernel reads whole pages: it gets the pages of a row's chunk.
        chunks_are_pages = self._limits.chunk_size % page_positions == 0
        self._kernel = row_kernel if page_positions == PAGE_POSITIONS and chunks_are_pages else None
        self._reader = segment_kernel
        self._page_positions = page_positions

    def kernel_pages(self, num_groups: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pages as `CPagedAttention` reads them, [P, G, D, positions] and [P, G, positions, D].

        The first call allocates them.

        Args:
            like: a tensor of their dtype and device.
        """
        keys = self._keys.allocate(like, num_groups, head_dim, is_transposed=True)
        return keys, self._values.allocate(like, num_groups, head_dim, is_transposed=False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: PackedDocuments | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Cache the new keys and values, then attend. It does not communicate.

        Args:
            q: queries, [R, 1, A, D].
            k: keys of the same tokens, [R, 1, G, D].
            v: values, [R, 1, G, D or narrower].
            sinks, scale: see `CoreAttention`. sinks [A].

        Returns:
            [R, 1, A, D].
        """
        assert documents is None, "a continued text is one document"
        rows = self._pass.current
        if not len(q):
            return q.new_empty(0, 1, q.shape[2], v.shape[3])
        q_RAD, k_RGD, v_RGD = (x.squeeze(1) for x in (q, k, v))
        if self._kernel is not None and self._kernel.supports(q_RAD, k_RGD, v_RGD):
            keys, values = self.kernel_pages(k_RGD.shape[1], k_RGD.shape[2], k_RGD)
            page_R = rows.slots_R // PAGE_POSITIONS
            offset_R = rows.slots_R % PAGE_POSITIONS
            keys[page_R, :, :, offset_R] = k_RGD
            values[page_R, :, offset_R] = v_RGD
            scaled = scale_queries(q_RAD, scale)
            tables, lengths = rows.row_tables, rows.lengths
            if chunk_size := self._limits.chunk_size:
                tables, lengths = chunk_tables(rows, chunk_size, chunk_size // PAGE_POSITIONS)
            out = self._kernel(scaled, keys, values, tables, lengths, self._limits.window, sinks)
            return out.unsqueeze(1)
        keys = self._keys.write(k_RGD, rows.slots_R)
        values = self._values.write(v_RGD, rows.slots_R)
        reason = self._gather_reason(q_RAD, k_RGD, v_RGD)
        self.page_path = self._page_path(reason, q.device)
        if not reason:
            assert self._reader is not None
            scaled = scale_queries(q_RAD, scale)
            out = self._reader(scaled, (keys, values), rows.page_segments, self._limits.window, sinks)
            return out.unsqueeze(1)
        return attend_pages(q_RAD, keys, values, rows, self._limits, sinks, scale).unsqueeze(1)

    def page_path_of(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return how pages are read for heads of these sizes, this dtype and this device. See base class."""
        return self._page_path(self._gather_reason(q, k, v), q.device)

    def _page_path(self, reason: str, device: torch.device) -> str:
        """Return how pages are read, or "" where no kernel would read their segments: off CUDA."""
        if self._reader is None and device.type != "cuda":
            return ""
        return f"gathered, as {reason}" if reason else "read by flash attention"

    def _gather_reason(self, q_RAD: Tensor, k_RGD: Tensor, v_RGD: Tensor) -> str:
        """Return the reason why pages are gathered for these tensors, or "" if a kernel reads their segments."""
        if self._reader is None:
            return "run.kernels='plain'"
        if self._limits.chunk_size:
            return "flash attention knows no attention chunks"
        return self._reader.unsupported_reason(q_RAD, k_RGD, v_RGD, self._page_positions)


class PagedLatents(PagedCache):
    """Cache of the latents and rotated keys, one vector for each token, replicated on the tensor-parallel ranks."""

    def __init__(self, current_pass: CurrentPass, num_pages: int, page_positions: int, window: int = 0) -> None:
        super().__init__(current_pass, num_pages, page_positions)
        self._latents = self._pages[0]
        self._limits = KeyLimits(window)

    def add(self, new_SBR: Tensor) -> None:
        """Cache the vectors of this pass, [R, 1, latent + rotated]."""
        if len(new_SBR):
            self._latents.write(new_SBR, self._pass.current.slots_R)

    def page_path_of(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return the description of gathered latents. See base class."""
        return "gathered, as flash attention does not take latents" if q.device.type == "cuda" else ""

    def attend(self, query_SBAR: Tensor, rank: int, scale: float) -> Tensor:
        """Attend to the cached vectors, which all heads share as keys. Their first `rank` dims are the values.

        Args:
            query_SBAR: queries in the space of latents and rotated keys, [R, 1, A, rank + rotated].

        Returns:
            [R, 1, A, rank].
        """
        if not len(query_SBAR):
            return query_SBAR[..., :rank]
        pages = self._latents.tensor
        assert pages is not None
        self.page_path = self.page_path_of(*[query_SBAR] * 3)
        # The values are the latents, the first columns of the keys: the other columns of the output are dropped.
        out = attend_pages(query_SBAR.squeeze(1), pages, pages, self._pass.current, self._limits, None, scale)
        return out[..., :rank].unsqueeze(1)


@dataclass(frozen=True)
class KeyLimits:
    """Limits of the keys of a row in addition to causality."""

    window: int = 0
    """Maximum number of keys of a row, its own included. 0: no limit."""
    chunk_size: int = 0
    """Tokens of an attention chunk. 0: no chunks."""

    def mask(self, key_positions_L: Tensor, positions_NS: Tensor) -> Tensor:
        """Return the mask of the keys that each row attends to, bool [N, S, L]."""
        positions_NS1 = positions_NS.unsqueeze(-1)
        mask_NSL = key_positions_L <= positions_NS1
        if self.window:
            mask_NSL &= key_positions_L > positions_NS1 - self.window
        if self.chunk_size:
            mask_NSL &= key_positions_L >= positions_NS1 - positions_NS1 % self.chunk_size
        return mask_NSL


def chunk_tables(rows: PassRows, chunk_size: int, pages_per_chunk: int) -> tuple[Tensor, Tensor]:
    """Return the pages of each row's attention chunk, and the keys in it up to the row, its own included.

    Returns:
        int32 [R, at most pages_per_chunk], int32 [R].
    """
    tables_RP = rows.row_tables
    first_R1 = (rows.positions_R // chunk_size * pages_per_chunk).unsqueeze(1)
    pages = first_R1 + torch.arange(min(pages_per_chunk, tables_RP.shape[1]), device=tables_RP.device)
    # Pages after the last page of a row are not read.
    tables = tables_RP.gather(1, pages.clamp(max=tables_RP.shape[1] - 1))
    return tables, (rows.positions_R % chunk_size + 1).int()


def attend_pages(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: PassRows,
    limits: KeyLimits,
    sinks: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Compute attention of each row to the keys at positions up to its own, within the limits. It does not communicate.

    Args:
        q: queries, [R, A, D].
        key_pages: [P, positions of a page, G, D].
        value_pages: [P, positions of a page, G, Dv].
        sinks: a logit for each query head that takes part in the softmax, [A].
        scale: factor of the scores. None means 1/sqrt(D).

    Returns:
        [R, A, Dv].
    """
    q = scale_queries(q, scale)
    out = q.new_empty(*q.shape[:2], value_pages.shape[-1])
    positions_R = rows.positions_R

    def attend(row_index: Tensor | slice, tables_NP: Tensor, last: int, shape: tuple[int, int]) -> None:
        queries_NSAD = q[row_index].unflatten(0, shape)
        positions_NS = positions_R[row_index].view(shape)
        num_pages = last // key_pages.shape[1] + 1
        keys, values = (x[tables_NP[:, :num_pages]].flatten(1, 2) for x in (key_pages, value_pages))
        attended = _masked_attention(queries_NSAD, keys, values, positions_NS, limits, sinks)
        out[row_index] = attended.flatten(0, 1)

    singles = rows.single_rows
    if singles:
        index = rows.rows_of_singles
        tables = rows.tables_NP if len(singles) == len(rows.counts) else rows.tables_NP[rows.segments_of_singles]
        size = max(1, MAX_GATHERED_ELEMENTS // (tables.shape[1] * key_pages.shape[1:].numel()))
        for start in range(0, len(singles), size):
            chunk = slice(start, start + size)
            last = max(rows.last_positions[i] for i in singles[chunk])
            chunk_rows = index[chunk]
            attend(chunk_rows, tables[chunk], last, (len(chunk_rows), 1))
    for i, span in rows.chunks:
        attend(span, rows.tables_NP[i : i + 1], rows.last_positions[i], (1, rows.counts[i]))
    return out


def _masked_attention(
    q_NSAD: Tensor, k_NLGD: Tensor, v_NLGD: Tensor, positions_NS: Tensor, limits: KeyLimits, sinks: Tensor | None
) -> Tensor:
    """Attend to keys at positions up to the position of each query, [N, S, A, Dv]."""
    mask_NSL = limits.mask(torch.arange(k_NLGD.shape[1], device=q_NSAD.device), positions_NS)
    if sinks is not None:
        sequence_first = (x.transpose(0, 1) for x in (q_NSAD, k_NLGD, v_NLGD))
        block = attention_block(*sequence_first, block_mask=mask_NSL)
        return fold_in_sinks(*block, sinks)[0].transpose(0, 1)
    q, k, v = (x.transpose(1, 2) for x in (q_NSAD, k_NLGD, v_NLGD))
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NSL.unsqueeze(1), enable_gqa=is_grouped)
    return out.transpose(1, 2)
