"""Rows of a pass through a model that generates, and the base class of the caches of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moefold.comm.host_copy import copy_to_device, copy_together_to_device
from moefold.ops.decode import DecodeRows
from moefold.ops.paged_attention import PageSegments
from moefold.ops.rope import Rope


@dataclass(frozen=True)
class PassRows:
    """Rows of one forward pass. Consecutive rows of one sample form a segment, at consecutive positions."""

    slots_R: Tensor
    """Index of each row in the cache, page * positions of a page + offset, int64 [R]."""
    positions_R: Tensor
    """Position of each row in its sample, int64 [R]."""
    tables_NP: Tensor
    """Pages of each segment in the order of positions, int32 [segments, pages of the longest], or 0 after the last."""
    counts: Sequence[int]
    """Rows of each segment, [segments]."""
    last_positions: Sequence[int]
    """Position of the last row of each segment, [segments]. The host knows it without a wait for the device."""
    state_slots_N: Tensor | None = None
    """Slot of each segment's state in `RecurrentStates`, int64 [segments], or None if no layer has states."""
    num_state_slots: int = 0
    """Largest slot of a state, plus 1."""

    @cached_property
    def single_rows(self) -> list[int]:
        """Segments of one row."""
        return [i for i, count in enumerate(self.counts) if count == 1]

    @cached_property
    def chunks(self) -> list[tuple[int, slice]]:
        """Segments of several rows, and these rows."""
        slices = []
        start = 0
        for i, count in enumerate(self.counts):
            if count > 1:
                slices.append((i, slice(start, start + count)))
            start += count
        return slices

    @cached_property
    def rows_of_singles(self) -> Tensor:
        """Row of each segment of one row, int64."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + count)
        return copy_to_device(torch.tensor([starts[i] for i in self.single_rows]), self.slots_R.device)

    @cached_property
    def segments_of_singles(self) -> Tensor:
        """Segments of one row, int64."""
        return copy_to_device(torch.tensor(self.single_rows), self.slots_R.device)

    @cached_property
    def row_tables(self) -> Tensor:
        """Pages of each row, int32 [R, pages]."""
        # A segment has at least one row.
        if len(self.counts) == len(self.slots_R):
            return self.tables_NP
        counts = copy_to_device(torch.tensor(self.counts), self.tables_NP.device)
        return self.tables_NP.repeat_interleave(counts, 0, output_size=len(self.slots_R))

    @cached_property
    def page_segments(self) -> PageSegments:
        """The segments for `FlashPages`."""
        key_counts = [last + 1 for last in self.last_positions]
        bounds = [list(accumulate(sizes, initial=0)) for sizes in (self.counts, key_counts)]
        arrays = [np.array(values, np.int32) for values in (*bounds, key_counts)]
        starts, key_starts, counts = copy_together_to_device(arrays, self.slots_R.device)
        return PageSegments(starts, key_starts, counts, self.tables_NP, max(self.counts), max(key_counts))

    @cached_property
    def lengths(self) -> Tensor:
        """Keys up to each row, its own included, int32 [R]."""
        return (self.positions_R + 1).int()


class CurrentPass:
    """The rows of the pass that runs. All layers share them."""

    single_sample = torch.zeros(1, dtype=torch.int64)
    """The sample ids of a pass, whose rows count as one sample."""

    def __init__(self) -> None:
        self.rows: PassRows | None = None
        self._decode_rows: tuple[PassRows, DecodeRows] | None = None

    @property
    def current(self) -> PassRows:
        """The rows."""
        assert self.rows is not None, "no pass runs"
        return self.rows

    def decode_rows(self, rope: Rope) -> DecodeRows:
        """Return the rows for `CDecode`. The layers of a pass share one RoPE, and get one object."""
        rows = self.current
        if self._decode_rows is None or self._decode_rows[0] is not rows:
            self._decode_rows = rows, DecodeRows(rows.slots_R, rows.row_tables, rows.lengths, rope.cos, rope.sin)
        return self._decode_rows[1]


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Size and contents of the paged cache."""

    num_pages: int
    page_positions: int
    kind: Literal["latents", "heads"] = "latents"
    """Contents of the cache of latent attention: latents, or the heads computed from them, as in training."""


class LayerCache:
    """Base class of the cache of a layer, which keeps the data of earlier tokens while a model generates."""

    page_path = ""
    """Description of how attention on CUDA read the pages in the last pass with rows, or "" on CPUs and before that."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, or 0 before the first pass."""
        raise NotImplementedError

    def page_path_of(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Return the `page_path` of a pass with queries [R, A, D], keys [R, G, D] and values [R, G, Dv]. R may be 0."""
        return ""

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages, int64 [n] each, without effect on a cache without pages."""

    def copy_states(self, source: Tensor, target: Tensor, num_slots: int) -> None:
        """Copy states between slots, int64 [n] each, all below `num_slots`. A cache without states is unchanged."""
