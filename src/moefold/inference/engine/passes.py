"""Scheduling of forward passes: continuous batching with chunked prefill, shared prompts and preemption; torch-free.

A pass mixes single tokens of samples that are decoded with chunks of prompts (arXiv:2308.16369), up to a number of
tokens. Samples of equal prompts share the pages of all prompt tokens but the last: these are computed once, as a
sequence of their own. If no page is free, the youngest sample gives up its pages and is computed again later.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.cost.kv_cache import PAGE_POSITIONS, CacheSizes, num_state_slots
from moefold.errors import ConfigError
from moefold.inference.engine.requests import EngineSettings, Request


def pages_for(num_positions: int) -> int:
    """Return the pages that hold a number of positions."""
    return -(-num_positions // PAGE_POSITIONS)


class PagePool:
    """Free list and reference counts of the pages of a cache.

    Args:
        num_pages: pages in all, numbered from 0.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return len(self._free)

    def take(self) -> int | None:
        """Allocate a page with one reference; None if no page is free."""
        if not self._free:
            return None
        page = self._free.pop()
        self._num_references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self._num_references[page] > 0, f"page {page} is free"
        self._num_references[page] += 1

    def release(self, page: int) -> None:
        """Remove a reference; the last one frees the page."""
        assert self._num_references[page] > 0, f"page {page} is free"
        self._num_references[page] -= 1
        if not self._num_references[page]:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return whether a page has more than one reference; it must be copied before it is written."""
        return self._num_references[page] > 1


class StateSlots:
    """Free list of the slots of recurrent states (linear attention); the lowest free slot is taken first.

    Args:
        num_slots: slots in all, numbered from 0.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))

    def take(self) -> int | None:
        """Allocate a slot; None if no slot is free."""
        return heappop(self._free) if self._free else None

    def release(self, slot: int) -> None:
        """Free a slot."""
        heappush(self._free, slot)


class PageTable:
    """Pages of one sequence in the order of its positions.

    Args:
        max_pages: pages that the sequence can have.
    """

    def __init__(self, pool: PagePool, max_pages: int) -> None:
        self._pool = pool
        self._pages: NDArray[np.int32] = np.zeros(max_pages, np.int32)
        self.num_shared_positions = 0
        """Positions of the pages that were taken from another table."""
        self.num_pages = 0
        """Pages of this sequence."""
        self.capacity = 0
        """Positions that fit into the pages of this sequence."""

    @property
    def pages(self) -> NDArray[np.int32]:
        """Page numbers, int32 [max_pages]; 0 after the last page."""
        return self._pages

    def page_of(self, position: int) -> int:
        """Return the page of a position."""
        assert position < self.capacity, (position, self.capacity)
        return int(self._pages[position // PAGE_POSITIONS])

    def shares_page_of(self, position: int) -> bool:
        """Return whether a position lies in a page that this table took from another one, and others refer to."""
        return position < self.num_shared_positions and self._pool.is_shared(self.page_of(position))

    def append(self, page: int) -> None:
        """Add an allocated page at the end; this table takes over its reference."""
        self._pages[self.num_pages] = page
        self._set_num_pages(self.num_pages + 1)

    def _set_num_pages(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.capacity = num_pages * PAGE_POSITIONS

    def replace(self, position: int, page: int) -> int:
        """Put an allocated page in place of a shared one; return the shared one, whose reference is removed.

        Args:
            page: the allocated page, into which the contents of the shared one must be copied.
        """
        index = position // PAGE_POSITIONS
        shared = int(self._pages[index])
        self._pages[index] = page
        self._pool.release(shared)
        return shared

    def share_from(self, other: "PageTable", num_positions: int) -> None:
        """Refer to the pages of the first positions of another sequence; this table must be empty."""
        assert not self.num_pages
        self._set_num_pages(pages_for(num_positions))
        self.num_shared_positions = self.capacity
        self._pages[: self.num_pages] = other._pages[: self.num_pages]
        for page in self._pages[: self.num_pages]:
            self._pool.share(int(page))

    def clear(self) -> None:
        """Remove all references."""
        for page in self._pages[: self.num_pages]:
            self._pool.release(int(page))
        self._pages[: self.num_pages] = 0
        self.num_shared_positions = 0
        self._set_num_pages(0)


@dataclass(frozen=True)
class PassLimits:
    """Limits of the passes."""

    slots: int
    """Most samples that have pages at once."""
    pass_tokens: int
    """Most tokens of a pass; at least `slots`."""
    num_pages: int
    """Pages of the cache; they must hold the longest sample."""
    share_prompts: bool = True


class PassSegment(NamedTuple):
    """Consecutive tokens of one sequence in a pass."""

    tokens: list[int]
    first: int
    """Position of the first of them."""
    table: PageTable
    """Pages of the sequence, including the pages of these tokens."""
    number: int
    """Number of the sample whose next token is drawn after the last of these tokens; -1: none is."""
    state_slot: int
    """Slot of the sequence's recurrent state."""
    scored_number: int = -1
    """Number of the sample whose prompt's log-probabilities are reported; -1: none are."""


@dataclass(frozen=True)
class Pass:
    """Tokens of one forward pass."""

    segments: list[PassSegment]
    copies: list[tuple[int, int]]
    """Pages to copy before the pass, (from, to), in this order."""
    state_copies: list[tuple[int, int]]
    """Slots whose recurrent state is copied before the pass, (from, to); all are read before any is written."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return sum(len(segment.tokens) for segment in self.segments)


SCORED_ROWS = 256
"""Most tokens of prompts in a pass whose log-probabilities are reported: each has logits over the vocabulary."""


class _Sequence:
    """Tokens, and how many of them are in the cache."""

    def __init__(self, tokens: list[int], table: PageTable, slots: StateSlots) -> None:
        self.tokens = tokens
        self.table = table
        self.num_cached = 0
        self.state_slot: int | None = None
        """Slot of the recurrent state after the cached tokens; None while there is none."""
        self._slots = slots

    @property
    def num_pending(self) -> int:
        """Tokens that are not cached yet."""
        return len(self.tokens) - self.num_cached

    def clear(self) -> None:
        """Give up all pages and the slot."""
        self.table.clear()
        self.num_cached = 0
        if self.state_slot is not None:
            self._slots.release(self.state_slot)
            self.state_slot = None


class _Sample(_Sequence):
    """A request with its new tokens."""

    def __init__(self, number: int, request: Request, table: PageTable, slots: StateSlots) -> None:
        super().__init__(list(request.prompt), table, slots)
        self.number = number
        self.prompt = request.prompt
        self.is_active = False
        self.scores_prompt = request.prompt_alternatives is not None
        self.prefix: _Sequence | None = None
        """The shared part of the prompt that this sample waits for."""

    @property
    def is_decoded(self) -> bool:
        """Return whether all tokens but the last are cached."""
        return self.prefix is None and len(self.tokens) - self.num_cached == 1


class PassScheduler:
    """Decides which tokens run in the next pass.

    After each `next_pass`, `append` or `finish` must be called for every segment that has a number. All decisions are
    a function of the calls, so ranks that make the same calls agree.
    """

    def __init__(self, limits: PassLimits) -> None:
        assert limits.pass_tokens >= limits.slots > 0
        self._limits = limits
        self._pool = PagePool(limits.num_pages)
        self._samples: dict[int, _Sample] = {}
        # Both are sorted by number.
        self._waiting: list[_Sample] = []
        self._active: list[_Sample] = []
        self._prefixes: dict[tuple[int, ...], _Sequence] = {}
        self._num_unfinished: Counter[tuple[int, ...]] = Counter()
        self._copies: list[tuple[int, int]] = []
        self._slots = StateSlots(num_state_slots(limits.slots))
        self.num_preemptions = 0
        """Times that a sample gave up its pages."""

    @property
    def has_work(self) -> bool:
        """Return whether a sample is unfinished."""
        return bool(self._samples)

    def add(self, number: int, request: Request) -> None:
        """Add a sample; a smaller number has priority.

        Args:
            number: unique among the unfinished samples, at least 0.
            request: the sample; its positions fit into the cache.
        """
        max_pages = pages_for(request.max_positions)
        assert max_pages <= self._limits.num_pages, (max_pages, self._limits.num_pages)
        assert number not in self._samples, number
        sample = _Sample(number, request, PageTable(self._pool, max_pages), self._slots)
        self._samples[number] = sample
        self._num_unfinished[sample.prompt] += 1
        bisect.insort(self._waiting, sample, key=_number)

    def cached_slots(self, number: int) -> NDArray[np.int64]:
        """Return the index in the cache of each token of a sample that was drawn: page * positions + offset, int64."""
        sample = self._samples[number]
        assert sample.is_active
        positions = np.arange(sample.num_cached)
        pages = sample.table.pages[positions // PAGE_POSITIONS].astype(np.int64)
        slots: NDArray[np.int64] = pages * PAGE_POSITIONS + positions % PAGE_POSITIONS
        return slots

    def append(self, number: int, token: int) -> None:
        """Add a drawn token to its sample."""
        sample = self._samples[number]
        assert sample.is_active
        assert not sample.num_pending, "the sample was not drawn"
        sample.tokens.append(token)

    def finish(self, number: int) -> None:
        """Remove a sample, drawn or not, and free its pages."""
        sample = self._samples.pop(number)
        (self._active if sample.is_active else self._waiting).remove(sample)
        sample.clear()
        self._num_unfinished[sample.prompt] -= 1
        if not self._num_unfinished[sample.prompt]:
            del self._num_unfinished[sample.prompt]
            if (prefix := self._prefixes.pop(sample.prompt, None)) is not None:
                prefix.clear()

    def next_pass(self) -> Pass:
        """Return the tokens of the next pass; they count as cached from now on."""
        self._copies = []
        self._admit()
        state_copies = []
        for sample in self._active:
            if sample.prefix is not None and not sample.prefix.num_pending:
                assert sample.prefix.state_slot is not None, "a cached prompt has a state"
                sample.table.share_from(sample.prefix.table, sample.prefix.num_cached)
                sample.num_cached = sample.prefix.num_cached
                state_copies.append((sample.prefix.state_slot, self._state_slot(sample)))
                sample.prefix = None
        num_decodes = sum(sample.is_decoded for sample in self._active)
        prefill_tokens = self._limits.pass_tokens - num_decodes
        scored_rows = SCORED_ROWS
        segments: list[PassSegment] = []
        # Oldest first: the pages that an older sample needs come from younger ones, which are not in the pass yet.
        for sample in list(self._active):
            if not sample.is_active:
                continue
            if sample.is_decoded:
                first = sample.num_cached
                if self._reserve(sample, 1, sample.number):
                    sample.num_cached = first + 1
                    slot = self._state_slot(sample)
                    segments.append(PassSegment(sample.tokens[first:], first, sample.table, sample.number, slot))
                continue
            assert sample.prefix is not None or sample.num_pending, "a drawn token was neither appended nor finished"
            sequence: _Sequence = sample if sample.prefix is None else sample.prefix
            room = min(prefill_tokens, scored_rows) if sample.scores_prompt else prefill_tokens
            count = self._reserve(sequence, min(sequence.num_pending, room), sample.number)
            if not count:
                continue
            prefill_tokens -= count
            if sample.scores_prompt:
                scored_rows -= count
            first = sequence.num_cached
            sequence.num_cached += count
            is_drawn = sequence is sample and not sample.num_pending
            tokens = sequence.tokens[first : first + count]
            number = sample.number if is_drawn else -1
            scored = sample.number if sample.scores_prompt else -1
            segments.append(PassSegment(tokens, first, sequence.table, number, self._state_slot(sequence), scored))
        assert segments or not self.has_work, "a pass without tokens"
        return Pass(segments, self._copies, state_copies)

    def _state_slot(self, sequence: _Sequence) -> int:
        """Return the slot of a sequence's state; a new one may come from a shared prompt that no sample waits for.

        Samples with a slot and shared prompts that are waited for are together at most as many as active samples, and
        there are more slots than these.
        """
        if sequence.state_slot is None:
            sequence.state_slot = self._slots.take()
        if sequence.state_slot is None:
            is_removed = self._remove_idle_prefix()
            assert is_removed, "every slot belongs to a sample or to a prompt that one waits for"
            sequence.state_slot = self._slots.take()
        assert sequence.state_slot is not None
        return sequence.state_slot

    def _admit(self) -> None:
        """Give slots to waiting samples, as long as there are pages for the tokens that they have."""
        num_free = self._pool.num_free
        while self._waiting and len(self._active) < self._limits.slots:
            sample = self._waiting[0]
            num_pages = pages_for(len(sample.tokens))
            prefix = None if sample.scores_prompt else self._prefixes.get(sample.prompt)
            if prefix is not None:
                # The page of the last tokens of the prompt is copied.
                num_pages += 1 - pages_for(len(prefix.tokens))
            if self._active and num_pages > num_free:
                return
            num_free -= num_pages
            del self._waiting[0]
            sample.is_active = True
            bisect.insort(self._active, sample, key=_number)
            sample.prefix = prefix if prefix is not None else self._new_prefix(sample)

    def _new_prefix(self, sample: _Sample) -> _Sequence | None:
        """Return the shared part of a prompt as a new sequence; None if no other sample would share it."""
        is_shared = self._limits.share_prompts and self._num_unfinished[sample.prompt] > 1 and not sample.scores_prompt
        if not is_shared or len(sample.prompt) == 1:
            return None
        shared = list(sample.prompt[:-1])
        prefix = _Sequence(shared, PageTable(self._pool, pages_for(len(shared))), self._slots)
        self._prefixes[sample.prompt] = prefix
        return prefix

    def _reserve(self, sequence: _Sequence, count: int, number: int) -> int:
        """Provide pages for the next tokens of a sequence; return for how many of them there are pages.

        Args:
            sequence: a sample, or the shared part of its prompt.
            number: of the sample; younger ones may have to give up their pages.
        """
        first = sequence.num_cached
        table = sequence.table
        if first >= table.num_shared_positions and table.capacity >= first + count:
            return count
        while table.shares_page_of(first) or table.capacity < first + count:
            page = self._pool.take()
            if page is None:
                if not self._free_pages(number):
                    return 0 if table.shares_page_of(first) else max(0, table.capacity - first)
            elif table.shares_page_of(first):
                self._copies.append((table.replace(first, page), page))
            else:
                table.append(page)
        return count

    def _free_pages(self, number: int) -> bool:
        """Remove one holder of pages; return False if there is none but older samples.

        The holder is a shared part of a prompt that no sample waits for, or else the youngest sample.
        """
        if self._remove_idle_prefix():
            return True
        youngest = self._active[-1]
        if youngest.number <= number:
            return False
        youngest.clear()
        youngest.prefix = None
        youngest.is_active = False
        self._active.remove(youngest)
        bisect.insort(self._waiting, youngest, key=_number)
        self.num_preemptions += 1
        return True

    def _remove_idle_prefix(self) -> bool:
        """Remove a cached shared part of a prompt that no sample waits for; return False if there is none."""
        in_use = {id(sample.prefix) for sample in self._active}
        for prompt, prefix in self._prefixes.items():
            if id(prefix) not in in_use and prefix.table.num_pages:
                prefix.clear()
                del self._prefixes[prompt]
                return True
        return False


def _number(sample: _Sample) -> int:
    return sample.number


MIN_PAGE_BYTES = 1024
"""Bytes that a page counts at least: in a model with linear attention alone, its entries in the page tables."""


def cache_pages(sizes: CacheSizes, settings: EngineSettings) -> int | None:
    """Return the pages that fit into the cache of a rank; None if the cache is as large as the requests need.

    Raises:
        ConfigError: not one fits.
    """
    if settings.cache_gib == 0:
        return None
    page_bytes = max(sizes.kv_bytes(PAGE_POSITIONS, settings.cache), MIN_PAGE_BYTES)
    state_bytes = num_state_slots(settings.slots) * sizes.state_bytes
    num_pages = int((settings.cache_gib * 2**30 - state_bytes) // page_bytes)
    if num_pages < 1 and state_bytes:
        raise ConfigError(
            f"cache_gib={settings.cache_gib:g} is smaller than one page of {PAGE_POSITIONS} tokens and the states of "
            f"linear attention with slots={settings.slots}, {(state_bytes + page_bytes) / 2**30:.3g} GiB; set at least "
            "that, or fewer slots"
        )
    if num_pages < 1:
        raise ConfigError(
            f"cache_gib={settings.cache_gib:g} is smaller than one page of {PAGE_POSITIONS} tokens, "
            f"{page_bytes / 2**30:.3g} GiB; set at least that"
        )
    return num_pages


def pages_needed(requests: Sequence[Request], settings: EngineSettings) -> int:
    """Return the most pages that the requests can use at once, at least 1.

    Samples that share a prompt have a copy of its last page each.
    """
    num_samples = Counter(request.prompt for request in requests)
    shared = settings.share_prompts
    sizes = (pages_for(r.max_positions) + (shared and num_samples[r.prompt] > 1) for r in requests)
    return max(1, sum(nlargest(settings.slots, sizes)))


def check_requests(requests: Sequence[Request], num_pages: int) -> None:
    """Check that the cache holds each request by itself; raise ConfigError if it does not."""
    check_longest(most_positions(requests), num_pages)


def most_positions(requests: Sequence[Request]) -> int:
    """Return the positions of the longest sample, prompt and new tokens; 0 without requests."""
    return max((request.max_positions for request in requests), default=0)


def check_longest(num_positions: int, num_pages: int) -> None:
    """Check that the cache holds a sample of that many positions; raise ConfigError if it does not."""
    if pages_for(num_positions) > num_pages:
        raise ConfigError(
            f"the cache of {num_pages * PAGE_POSITIONS} tokens holds no sample of {num_positions} (prompt and new "
            "tokens); set a larger cache_gib, or fewer new tokens"
        )
