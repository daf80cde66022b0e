"""Paged cache of sparse attention: keys, values and index keys of each sample, and the selection among them."""

import torch
from torch import Tensor

from moefold.model.paged_cache import MAX_GATHERED_ELEMENTS, CurrentPass, Pages, PassRows
from moefold.ops.block_attention import accumulation_dtype
from moefold.ops.exact_topk import exact_topk
from moefold.ops.sparse_attention import IndexTensors


class PagedSelection:
    """Cache of one layer of sparse attention; see `SelectedKeyCache`.

    A query selects positions of its own sample. Attention then reads the selected keys alone, by their slots.

    Args:
        current_pass: shared by the layers.
        num_pages: pages of the cache.
        page_positions: positions of a page.
    """

    def __init__(self, current_pass: CurrentPass, num_pages: int, page_positions: int) -> None:
        self._pass = current_pass
        self._keys = Pages(num_pages, page_positions)
        self._values = Pages(num_pages, page_positions)
        self._index_keys = Pages(num_pages, page_positions)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache; 0 before the first pass."""
        return self._keys.nbytes + self._values.nbytes + self._index_keys.nbytes

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages, int64 [n] each."""
        for pages in (self._keys, self._values, self._index_keys):
            pages.copy(source, target)

    def extend(
        self, index: IndexTensors, key: Tensor, value: Tensor | None, top_k: int, window: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Cache the tokens of this pass, then select keys for them; see `SelectedKeyCache`. Local."""
        rows = self._pass.current
        keys = self._keys.write(key.squeeze(1), rows.slots_R)
        values = None if value is None else self._values.write(value.squeeze(1), rows.slots_R)
        index_keys = self._index_keys.write(index.key, rows.slots_R).squeeze(2)
        selected = select_slots(index, index_keys, rows, top_k, window)
        flat_values = None if values is None else values.flatten(0, 1).unsqueeze(1)
        return keys.flatten(0, 1).unsqueeze(1), flat_values, selected.unsqueeze(1)


def select_slots(index: IndexTensors, index_keys: Tensor, rows: PassRows, top_k: int, window: int) -> Tensor:
    """Select the cached keys of each row among those of its sample at positions up to its own.

    Args:
        index: projections of the rows, [R, 1, ...].
        index_keys: pages of the index keys, [P, positions of a page, D].
        rows: the pass.
        top_k: most keys of a row.
        window: most keys that a row sees; 0: no limit.

    Returns:
        Slots in the order of positions, then -1, int32 [R, K].
    """
    positions_R = rows.positions_R
    page_positions = index_keys.shape[1]
    width = min(top_k, int(positions_R.max()) + 1) if len(positions_R) else 1
    found = positions_R.new_full((len(positions_R), width), -1, dtype=torch.int32)

    def select(chosen: Tensor | slice, tables_NP: Tensor) -> None:
        """Select for rows of one table each, or for all rows of one sample."""
        positions = positions_R[chosen]
        num_pages = int(positions.max()) // page_positions + 1
        tables_NP = tables_NP[:, :num_pages]
        keys_NLD = index_keys[tables_NP.long()].flatten(1, 2)
        scores = _scores(index.query[chosen, 0], index.weight[chosen, 0], keys_NLD)
        stops = (positions + 1).int()
        starts = (stops - window).clamp(min=0) if window else torch.zeros_like(stops)
        best_RK = exact_topk(scores, width, starts=starts, stops=stops).long()
        pages = tables_NP.expand(len(best_RK), -1).gather(1, best_RK.clamp(min=0) // page_positions)
        slots = pages.long() * page_positions + best_RK.clamp(min=0) % page_positions
        found[chosen] = slots.masked_fill(best_RK < 0, -1).int()

    singles = rows.single_rows
    if singles:
        tables = rows.tables_NP if len(singles) == len(rows.counts) else rows.tables_NP[singles]
        per_row = tables.shape[1] * page_positions * index_keys.shape[2]
        for part in torch.arange(len(singles)).split(max(1, MAX_GATHERED_ELEMENTS // per_row)):
            select(rows.rows_of_singles[part.to(positions_R.device)], tables[part.to(positions_R.device)])
    for i, span in rows.chunks:
        size = max(1, MAX_GATHERED_ELEMENTS // (index.query.shape[2] * (int(positions_R[span].max()) + 1)))
        for start in range(span.start, span.stop, size):
            select(slice(start, min(start + size, span.stop)), rows.tables_NP[i : i + 1])
    return found


def _scores(query_RJD: Tensor, weight_RJ: Tensor, keys_NLD: Tensor) -> Tensor:
    """Return the scores [R, L] of keys of one sample (N = 1), or of one sample for each row (N = R)."""
    dtype = accumulation_dtype(query_RJD.dtype)
    dots_RJL = (query_RJD.to(dtype) @ keys_NLD.to(dtype).mT).relu_()
    return (
        (weight_RJ.to(dtype).unsqueeze(1) @ dots_RJL)
        .squeeze(1)
        .nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    )
