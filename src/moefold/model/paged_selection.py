"""Paged cache of sparse attention: keys, values and index keys of each sample, and the selection among them."""

from typing import ClassVar

import torch
from torch import Tensor

from moefold.model.attention import SelfAttention
from moefold.model.layer_cache import CacheSize, CurrentPass, LayerCache, PassRows
from moefold.model.paged_cache import MAX_GATHERED_ELEMENTS, PagedCache
from moefold.ops.block_attention import accumulation_dtype
from moefold.ops.exact_topk import exact_topk
from moefold.ops.sparse_attention import IndexTensors

GUESSED_FACTOR = 4
"""Minimum ratio of cached to selected keys for keeping selections of the last pass. Below it, `exact_topk` does not
read them.
"""


class LastSelections:
    """Positions that the last pass selected for samples of one row: these samples probably select them again.

    4 K bytes for each sample.
    """

    def __init__(self) -> None:
        self._slots_R: Tensor | None = None
        self._positions_RK: Tensor | None = None

    def store(self, slots_R: Tensor, positions_RK: Tensor) -> None:
        """Replace the selections: slots of the rows in the cache, and their positions, int32 [R, K]."""
        self._slots_R = slots_R
        self._positions_RK = positions_RK

    def clear(self) -> None:
        """Forget the selections."""
        self._slots_R = None
        self._positions_RK = None

    def previous_selections(self, previous_slots_R: Tensor) -> Tensor | None:
        """Return the selections of the rows with these slots, int32 [R, K], -1 for other rows. None without selections.

        Args:
            previous_slots_R: slot of the position before each row's, which no other sample writes.
        """
        if self._slots_R is None or self._positions_RK is None:
            return None
        is_same_RR = previous_slots_R.unsqueeze(1) == self._slots_R
        found_RK = self._positions_RK[is_same_RR.int().argmax(1)]
        return found_RK.masked_fill(~is_same_RR.any(1, keepdim=True), -1)


class SelectingAttention(SelfAttention):
    """Base class of attention to selected keys."""

    selects_keys: ClassVar[bool] = True
    fused_refusal: ClassVar[str] = "sparse attention"
    selected_keys: "PagedSelection | None" = None

    def open_caches(self, current_pass: CurrentPass, size: CacheSize) -> list[LayerCache]:
        """Cache index keys too. See base class. While the indexer warms up, all keys are attended to."""
        self.selected_keys = PagedSelection(current_pass, size.num_pages, size.page_positions)
        return [*super().open_caches(current_pass, size), self.selected_keys]

    def close_caches(self) -> None:
        """See base class."""
        super().close_caches()
        self.selected_keys = None


class PagedSelection(PagedCache):
    """Cache of one layer of sparse attention: keys, values and index keys.

    A query selects positions of its own sample. Attention then reads only the selected keys, by their slots.
    """

    def __init__(self, current_pass: CurrentPass, num_pages: int, page_positions: int) -> None:
        super().__init__(current_pass, num_pages, page_positions, 3)
        self._keys, self._values, self._index_keys = self._pages
        self._last = LastSelections()

    def extend(
        self, index: IndexTensors, key: Tensor, value: Tensor | None, top_k: int, window: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Cache the tokens of this pass, then select keys for them. It does not communicate.

        Args:
            index: projections of the pass, with its own keys only.
            key: [R, 1, G, D].
            value: [R, 1, G, Dv]. None means parts of the keys.
            window: maximum number of keys that a query sees, its own included. 0: no limit.

        Returns:
            All cached keys [slots, 1, G, D] and values, and the slots of the selected keys, int32 [R, 1, K].
        """
        rows = self._pass.current
        keys, values = self.store(key, value)
        index_keys = self._index_keys.write(index.key, rows.slots_R).squeeze(2)
        selected = select_slots(index, index_keys, rows, top_k, window, self._last)
        return keys, values, selected.unsqueeze(1)

    def store(self, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Cache the tokens of this pass in a layer without an indexer, and return keys and values."""
        slots_R = self._pass.current.slots_R
        keys = self._keys.write(key.squeeze(1), slots_R).flatten(0, 1).unsqueeze(1)
        if value is None:
            return keys, None
        return keys, self._values.write(value.squeeze(1), slots_R).flatten(0, 1).unsqueeze(1)


def select_slots(
    index: IndexTensors, index_keys: Tensor, rows: PassRows, top_k: int, window: int, last: LastSelections
) -> Tensor:
    """Select the cached keys of each row among the keys of its sample at positions up to its own.

    Args:
        index: projections of the rows, [R, 1, ...].
        index_keys: pages of the index keys, [P, positions of a page, D].
        window: maximum number of keys that a row sees. 0: no limit.
        last: selections of the last pass, which are replaced. They save time and change no result.

    Returns:
        Slots in the order of positions, then -1, int32 [R, K].
    """
    positions_R = rows.positions_R
    page_positions = index_keys.shape[1]
    longest = 1 + max(rows.last_positions, default=0)
    width = min(top_k, longest)
    slots_of_rows = positions_R.new_full((len(positions_R), width), -1, dtype=torch.int32)

    def select(row_ids: Tensor | slice, farthest: int, tables_NP: Tensor, guess_RK: Tensor | None = None) -> Tensor:
        """Select keys for rows with a table each, or for all rows of one sample. Return positions, int32 [rows, K]."""
        positions = positions_R[row_ids]
        num_pages = farthest // page_positions + 1
        tables_NP = tables_NP[:, :num_pages]
        keys_NLD = index_keys[tables_NP.long()].flatten(1, 2)
        scores = _scores(index.query[row_ids, 0], index.weight[row_ids, 0], keys_NLD)
        stops = (positions + 1).int()
        starts = (stops - window).clamp(min=0) if window else torch.zeros_like(stops)
        selected_RK = exact_topk(scores, width, starts=starts, stops=stops, guess=guess_RK)
        best_RK = selected_RK.long()
        pages = tables_NP.expand(len(best_RK), -1).gather(1, best_RK.clamp(min=0) // page_positions)
        slots = pages.long() * page_positions + best_RK.clamp(min=0) % page_positions
        slots_of_rows[row_ids] = slots.masked_fill(best_RK < 0, -1).int()
        return selected_RK

    singles = rows.single_rows
    if singles:
        keeps_last = longest > GUESSED_FACTOR * width
        selected = []
        tables = rows.tables_NP if len(singles) == len(rows.counts) else rows.tables_NP[rows.segments_of_singles]
        size = max(1, MAX_GATHERED_ELEMENTS // (tables.shape[1] * page_positions * index_keys.shape[2]))
        for start in range(0, len(singles), size):
            chunk = slice(start, start + size)
            farthest = max(rows.last_positions[i] for i in singles[chunk])
            part_tables = tables[chunk]
            chosen_rows = rows.rows_of_singles[chunk]
            previous = _previous_slots(part_tables, positions_R[chosen_rows], page_positions)
            selected.append(
                select(chosen_rows, farthest, part_tables, last.previous_selections(previous) if keeps_last else None)
            )
        if keeps_last:
            last.store(rows.slots_R[rows.rows_of_singles], torch.cat(selected))
        else:
            last.clear()
    for i, span in rows.chunks:
        size = max(1, MAX_GATHERED_ELEMENTS // (index.query.shape[2] * (rows.last_positions[i] + 1)))
        for start in range(span.start, span.stop, size):
            stop = min(start + size, span.stop)
            farthest = rows.last_positions[i] - (span.stop - stop)
            select(slice(start, stop), farthest, rows.tables_NP[i : i + 1])
    return slots_of_rows


def _previous_slots(tables_RP: Tensor, positions_R: Tensor, page_positions: int) -> Tensor:
    """Return the slot of the position before each row's, int64 [R], or -1 for position 0."""
    before_R = (positions_R - 1).clamp(min=0)
    pages_R = tables_RP.gather(1, (before_R // page_positions).unsqueeze(1)).squeeze(1)
    slots_R = pages_R.long() * page_positions + before_R % page_positions
    return slots_R.masked_fill(positions_R == 0, -1)


def _scores(query_RJD: Tensor, weight_RJ: Tensor, keys_NLD: Tensor) -> Tensor:
    """Return the scores [R, L] of keys of one sample (N = 1), or of one sample for each row (N = R)."""
    dtype = accumulation_dtype(query_RJD.dtype)
    dots_RJL = (query_RJD.to(dtype) @ keys_NLD.to(dtype).mT).relu_()
    return (
        (weight_RJ.to(dtype).unsqueeze(1) @ dots_RJL)
        .squeeze(1)
        .nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    )
