"""Pages of a paged KV cache (arXiv:2309.06180): allocation, page tables with copy-on-write, and how many are needed.

The size of a page is in `cost/kv_cache.py`. The module also has the slots of recurrent states, one for each
sequence.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush, nlargest

import numpy as np
from numpy.typing import NDArray

from moefold.cost.kv_cache import CacheSizes, num_state_slots
from moefold.errors import ConfigError
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.message_text import Setting


def pages_for(num_positions: int, page_positions: int) -> int:
    """Return the pages that hold a number of positions."""
    return -(-num_positions // page_positions)


class PagePool:
    """Free list and reference counts of the pages of a cache, numbered from 0."""

    def __init__(self, num_pages: int, page_positions: int) -> None:
        self.page_positions = page_positions
        self._num_references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_changes = 0
        """Number of references added and removed: page tables change with it."""

    @property
    def num_pages(self) -> int:
        """Total number of pages."""
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return len(self._free)

    def take(self) -> int | None:
        """Allocate a page with one reference. Return None if no page is free."""
        if not self._free:
            return None
        page = self._free.pop()
        self._num_references[page] = 1
        self.num_changes += 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self._num_references[page] > 0, f"page {page} is free"
        self._num_references[page] += 1
        self.num_changes += 1

    def release(self, page: int) -> None:
        """Remove a reference. Removing the last one frees the page."""
        assert self._num_references[page] > 0, f"page {page} is free"
        self._num_references[page] -= 1
        self.num_changes += 1
        if not self._num_references[page]:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return whether a page has more than one reference. It must be copied before it is written."""
        return self._num_references[page] > 1


class StateSlots:
    """Free list of the slots of recurrent states (linear attention). The lowest free slot is taken first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))

    def take(self) -> int | None:
        """Allocate a slot. Return None if no slot is free."""
        return heappop(self._free) if self._free else None

    def release(self, slot: int) -> None:
        """Free a slot."""
        heappush(self._free, slot)


class PageTable:
    """Pages of one sequence in the order of its positions."""

    def __init__(self, pool: PagePool, max_pages: int) -> None:
        self._pool = pool
        self.pages: NDArray[np.int32] = np.zeros(max_pages, np.int32)
        """Page numbers, int32 [max_pages], or 0 after the last page."""
        self.num_shared_positions = 0
        """Positions of the pages shared from another table."""
        self.num_pages = 0
        """Pages of this sequence."""
        self.capacity = 0
        """Positions that fit into the pages of this sequence."""

    def page_of(self, position: int) -> int:
        """Return the page of a position."""
        assert position < self.capacity, (position, self.capacity)
        return int(self.pages[position // self._pool.page_positions])

    def shares_page_of(self, position: int) -> bool:
        """Return whether a position is in a page that was shared from another table and still has other references."""
        return position < self.num_shared_positions and self._pool.is_shared(self.page_of(position))

    def append(self, page: int) -> None:
        """Add an allocated page at the end. This table takes over its reference."""
        self.pages[self.num_pages] = page
        self._set_num_pages(self.num_pages + 1)

    def _set_num_pages(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.capacity = num_pages * self._pool.page_positions

    def replace(self, position: int, page: int) -> int:
        """Replace the shared page of a position by an allocated one, and return it, whose reference is removed.

        The caller must copy the contents of the shared page to the other one.
        """
        index = position // self._pool.page_positions
        shared = int(self.pages[index])
        self.pages[index] = page
        self._pool.release(shared)
        return shared

    def share_from(self, other: "PageTable", num_positions: int) -> None:
        """Refer to the pages of the first positions of another sequence. This table must be empty."""
        assert not self.num_pages
        self._set_num_pages(pages_for(num_positions, self._pool.page_positions))
        self.num_shared_positions = self.capacity
        self.pages[: self.num_pages] = other.pages[: self.num_pages]
        for page in self.pages[: self.num_pages]:
            self._pool.share(int(page))

    def clear(self) -> None:
        """Release all pages of the sequence, which frees the ones that no other sequence shares."""
        for page in self.pages[: self.num_pages]:
            self._pool.release(int(page))
        self.pages[: self.num_pages] = 0
        self.num_shared_positions = 0
        self._set_num_pages(0)


class PageTableReader:
    """Reads the page tables of the sequences of a pass, and again only if these have changed since the last pass."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._num_changes = -1
        self._tables: list[PageTable] = []
        self._pages = np.zeros((0, 1), np.int32)

    def read(self, tables: list[PageTable]) -> NDArray[np.int32]:
        """Return the pages of each sequence to read, int32 [sequences, pages of the longest], 0 after its last."""
        if self._num_changes != self._pool.num_changes or self._tables != tables:
            self._pages = np.zeros((len(tables), max((table.num_pages for table in tables), default=1)), np.int32)
            for row, table in zip(self._pages, tables, strict=True):
                row[: table.num_pages] = table.pages[: table.num_pages]
            self._num_changes = self._pool.num_changes
            self._tables = tables
        return self._pages


MIN_PAGE_BYTES = 1024
"""Minimum bytes counted for a page: with only linear attention, a page consists of entries in the page tables."""


def cache_pages(sizes: CacheSizes, settings: EngineSettings) -> int | None:
    """Return the pages that fit into the cache of a rank, at least one, or None for as many as the requests need."""
    if settings.cache_gib == 0:
        return None
    page_bytes = max(sizes.kv_bytes(sizes.page_positions, settings.cache), MIN_PAGE_BYTES)
    state_bytes = num_state_slots(settings.slots) * sizes.state_bytes
    num_pages = int((settings.cache_gib * 2**30 - state_bytes) // page_bytes)
    if num_pages < 1 and state_bytes:
        raise ConfigError(
            f"{Setting('rollout.cache_gib', settings.cache_gib):g} is smaller than one page of {sizes.page_positions} "
            f"tokens and the states of linear attention, {(state_bytes + page_bytes) / 2**30:.3g} GiB; set at least "
            f"that, or fewer {Setting('rollout.slots')}"
        )
    if num_pages < 1:
        raise ConfigError(
            f"{Setting('rollout.cache_gib', settings.cache_gib):g} is smaller than one page of {sizes.page_positions} "
            f"tokens, {page_bytes / 2**30:.3g} GiB; set at least that"
        )
    return num_pages


def pages_needed(requests: Sequence[Request], settings: EngineSettings, page_positions: int) -> int:
    """Return the maximum pages, of `page_positions` each, that the requests can use at once, at least 1.

    Each of the samples with a shared prompt has a copy of its last page.
    """
    num_samples = Counter(request.prompt for request in requests)
    shared = settings.share_prompts
    sizes = (pages_for(r.max_positions, page_positions) + (shared and num_samples[r.prompt] > 1) for r in requests)
    return max(1, sum(nlargest(settings.slots, sizes)))


def check_requests(requests: Sequence[Request], num_pages: int, page_positions: int) -> None:
    """Raise ConfigError if a cache of this size is too small for one of the requests."""
    check_longest(most_positions(requests), num_pages, page_positions)


def most_positions(requests: Sequence[Request]) -> int:
    """Return the positions of the longest sample, prompt and new tokens, or 0 without requests."""
    return max((request.max_positions for request in requests), default=0)


def check_longest(num_positions: int, num_pages: int, page_positions: int) -> None:
    """Raise ConfigError if a cache of this size is too small for a sample of the given positions."""
    if pages_for(num_positions, page_positions) > num_pages:
        raise ConfigError(
            f"the cache of {num_pages * page_positions} tokens holds no sample of {num_positions} (prompt and new "
            f"tokens); set a larger {Setting('rollout.cache_gib')}, or fewer new tokens"
        )
