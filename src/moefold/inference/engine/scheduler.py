"""Scheduling of forward passes: continuous batching with chunked prefill, shared prompts and preemption.

A pass mixes single tokens of decoded samples with chunks of prompts (arXiv:2308.16369), up to a number of tokens.
Samples with equal prompts share the pages of all prompt tokens except the last token: these are computed once, as a
separate sequence. If no page is free, the youngest sample loses its pages and is recomputed later.
"""

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moefold.cost.kv_cache import num_state_slots
from moefold.inference.engine.pages import PagePool, PageTable, StateSlots, pages_for
from moefold.inference.engine.requests import Request


@dataclass(frozen=True)
class PassLimits:
    """Limits of the scheduler: samples and tokens of a forward pass, and pages of the cache."""

    slots: int
    """Maximum samples with pages at a time."""
    pass_tokens: int
    """Maximum tokens of a pass, at least `slots`."""
    num_pages: int
    """Pages of the cache. They must hold the longest sample."""
    page_positions: int
    share_prompts: bool = True


class PassSegment(NamedTuple):
    """Consecutive tokens of one sequence in a pass."""

    tokens: list[int]
    first: int
    """Position of the first token."""
    table: PageTable
    """Pages of the sequence, including the pages of these tokens."""
    request_id: int
    """Id of the sample whose next token is drawn after the last of these tokens. -1: no draw."""
    state_slot: int
    """Slot of the sequence's recurrent state."""
    scored_id: int = -1
    """Id of the sample whose prompt's log-probabilities are reported. -1: no report."""


@dataclass(frozen=True)
class Pass:
    """Tokens of one forward pass."""

    segments: list[PassSegment]
    copies: list[tuple[int, int]]
    """Pages to copy before the pass, (from, to), in this order."""
    state_copies: list[tuple[int, int]]
    """Slots whose recurrent state is copied before the pass, (from, to). All are read before any is written."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return sum(len(segment.tokens) for segment in self.segments)


SCORED_ROWS = 256
"""Maximum scored tokens of prompts in a pass, because each needs logits over the vocabulary."""


class _Sequence:
    """Tokens of a sequence, and the number of cached tokens."""

    def __init__(self, tokens: list[int], table: PageTable, slots: StateSlots) -> None:
        self.tokens = tokens
        self.table = table
        self.num_cached = 0
        self.state_slot: int | None = None
        """Slot of the recurrent state after the cached tokens."""
        self._slots = slots

    @property
    def num_pending(self) -> int:
        """Tokens that are not cached yet."""
        return len(self.tokens) - self.num_cached

    def clear(self) -> None:
        """Release all pages and the slot."""
        self.table.clear()
        self.num_cached = 0
        if self.state_slot is not None:
            self._slots.release(self.state_slot)
            self.state_slot = None


class _Sample(_Sequence):
    """Request with its new tokens."""

    def __init__(self, request_id: int, request: Request, table: PageTable, slots: StateSlots) -> None:
        super().__init__(list(request.prompt), table, slots)
        self.request_id = request_id
        self.prompt = request.prompt
        self.is_active = False
        self.scores_prompt = request.prompt_alternatives is not None
        self.prefix: _Sequence | None = None
        """Shared part of the prompt, if this sample waits for it."""

    @property
    def is_decoded(self) -> bool:
        """Return whether all tokens except the last are cached."""
        return self.prefix is None and len(self.tokens) - self.num_cached == 1


class PassScheduler:
    """Scheduler of the tokens of the next pass.

    After each `next_pass`, `append` or `finish` must be called for every segment with an id. All decisions are a
    function of the calls, so ranks with the same calls agree.
    """

    def __init__(self, limits: PassLimits) -> None:
        assert limits.pass_tokens >= limits.slots > 0
        self._limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_positions)
        self._samples: dict[int, _Sample] = {}
        # Both are sorted by id.
        self._waiting: list[_Sample] = []
        self._active: list[_Sample] = []
        self._prefixes: dict[tuple[int, ...], _Sequence] = {}
        self._num_unfinished: Counter[tuple[int, ...]] = Counter()
        self._copies: list[tuple[int, int]] = []
        self._slots = StateSlots(num_state_slots(limits.slots))
        self.num_preemptions = 0
        """Number of times that a sample lost its pages."""

    @property
    def page_positions(self) -> int:
        """Positions of a page."""
        return self._limits.page_positions

    def _pages_for(self, num_positions: int) -> int:
        return pages_for(num_positions, self._limits.page_positions)

    @property
    def has_work(self) -> bool:
        """Return whether a sample is unfinished."""
        return bool(self._samples)

    def add(self, request_id: int, request: Request) -> None:
        """Add a sample that fits into the cache. Its id is unique, at least 0, and smaller ones have priority."""
        max_pages = self._pages_for(request.max_positions)
        assert max_pages <= self._limits.num_pages, (max_pages, self._limits.num_pages)
        assert request_id not in self._samples, request_id
        sample = _Sample(request_id, request, PageTable(self.pool, max_pages), self._slots)
        self._samples[request_id] = sample
        self._num_unfinished[sample.prompt] += 1
        bisect.insort(self._waiting, sample, key=_request_id)

    def cached_slots(self, request_id: int) -> NDArray[np.int64]:
        """Return the cache index of each token of a drawn sample: page * positions + offset, int64."""
        sample = self._samples[request_id]
        assert sample.is_active
        positions = np.arange(sample.num_cached)
        page_positions = self._limits.page_positions
        pages = sample.table.pages[positions // page_positions].astype(np.int64)
        return pages * page_positions + positions % page_positions

    def append(self, request_id: int, token: int) -> None:
        """Add a drawn token to its sample."""
        sample = self._samples[request_id]
        assert sample.is_active
        assert not sample.num_pending, "the sample was not drawn"
        sample.tokens.append(token)

    def finish(self, request_id: int) -> None:
        """Remove a sample, drawn or not, and free its pages."""
        sample = self._samples.pop(request_id)
        (self._active if sample.is_active else self._waiting).remove(sample)
        sample.clear()
        self._num_unfinished[sample.prompt] -= 1
        if not self._num_unfinished[sample.prompt]:
            del self._num_unfinished[sample.prompt]
            if (prefix := self._prefixes.pop(sample.prompt, None)) is not None:
                prefix.clear()

    def next_pass(self) -> Pass:
        """Return the tokens of the next pass. They count as cached from now on."""
        self._copies = []
        self._admit()
        state_copies = self._attach_prefixes()
        num_decodes = sum(sample.is_decoded for sample in self._active)
        prefill_tokens = self._limits.pass_tokens - num_decodes
        scored_rows = SCORED_ROWS
        segments: list[PassSegment] = []
        # Oldest first: pages for an older sample are taken from younger samples, which are not in the pass yet.
        for sample in list(self._active):
            if not sample.is_active:
                continue
            if sample.is_decoded:
                segment = self._decode_segment(sample)
            else:
                room = min(prefill_tokens, scored_rows) if sample.scores_prompt else prefill_tokens
                segment = self._prefill_segment(sample, room)
                count = 0 if segment is None else len(segment.tokens)
                prefill_tokens -= count
                scored_rows -= count if sample.scores_prompt else 0
            if segment is not None:
                segments.append(segment)
        assert segments or not self.has_work, "a pass without tokens"
        return Pass(segments, self._copies, state_copies)

    def _attach_prefixes(self) -> list[tuple[int, int]]:
        """Give cached shared prompts to the samples that wait for them, and return the slots of states to copy."""
        state_copies = []
        for sample in self._active:
            if sample.prefix is not None and not sample.prefix.num_pending:
                assert sample.prefix.state_slot is not None, "a cached prompt has a state"
                sample.table.share_from(sample.prefix.table, sample.prefix.num_cached)
                sample.num_cached = sample.prefix.num_cached
                state_copies.append((sample.prefix.state_slot, self._state_slot(sample)))
                sample.prefix = None
        return state_copies

    def _decode_segment(self, sample: _Sample) -> PassSegment | None:
        """Return the last token of a sample, whose others are cached, or None without a page for it."""
        first = sample.num_cached
        if not self._reserve(sample, 1, sample.request_id):
            return None
        sample.num_cached = first + 1
        return PassSegment(sample.tokens[first:], first, sample.table, sample.request_id, self._state_slot(sample))

    def _prefill_segment(self, sample: _Sample, room: int) -> PassSegment | None:
        """Return the next tokens of a prompt, at most `room`, or None without room or pages."""
        assert sample.prefix is not None or sample.num_pending, "a drawn token was neither appended nor finished"
        sequence: _Sequence = sample if sample.prefix is None else sample.prefix
        count = self._reserve(sequence, min(sequence.num_pending, room), sample.request_id)
        if not count:
            return None
        first = sequence.num_cached
        sequence.num_cached += count
        is_drawn = sequence is sample and not sample.num_pending
        tokens = sequence.tokens[first : first + count]
        request_id = sample.request_id if is_drawn else -1
        scored = sample.request_id if sample.scores_prompt else -1
        return PassSegment(tokens, first, sequence.table, request_id, self._state_slot(sequence), scored)

    def _state_slot(self, sequence: _Sequence) -> int:
        """Return the slot of a sequence's state. A new slot may come from a shared prompt that no sample waits for.

        Samples with a slot and shared prompts with waiting samples are together not more than the active samples, and
        there are more slots than active samples.
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
        """Give slots to waiting samples, as long as there are pages for their tokens."""
        num_free = self.pool.num_free
        while self._waiting and len(self._active) < self._limits.slots:
            sample = self._waiting[0]
            num_pages = self._pages_for(len(sample.tokens))
            prefix = None if sample.scores_prompt else self._prefixes.get(sample.prompt)
            if prefix is not None:
                # The page of the last tokens of the prompt is copied.
                num_pages += 1 - self._pages_for(len(prefix.tokens))
            if self._active and num_pages > num_free:
                return
            num_free -= num_pages
            del self._waiting[0]
            sample.is_active = True
            bisect.insort(self._active, sample, key=_request_id)
            sample.prefix = prefix if prefix is not None else self._new_prefix(sample)

    def _new_prefix(self, sample: _Sample) -> _Sequence | None:
        """Return the shared part of a prompt as a new sequence, or None if no other sample would share it."""
        is_shared = self._limits.share_prompts and self._num_unfinished[sample.prompt] > 1 and not sample.scores_prompt
        if not is_shared or len(sample.prompt) == 1:
            return None
        shared = list(sample.prompt[:-1])
        prefix = _Sequence(shared, PageTable(self.pool, self._pages_for(len(shared))), self._slots)
        self._prefixes[sample.prompt] = prefix
        return prefix

    def _reserve(self, sequence: _Sequence, count: int, request_id: int) -> int:
        """Provide pages for the next tokens of a sequence, and return the number of tokens with pages.

        Samples younger than `request_id` may lose their pages.
        """
        first = sequence.num_cached
        table = sequence.table
        if first >= table.num_shared_positions and table.capacity >= first + count:
            return count
        while table.shares_page_of(first) or table.capacity < first + count:
            page = self.pool.take()
            if page is None:
                if not self._free_pages(request_id):
                    return 0 if table.shares_page_of(first) else max(0, table.capacity - first)
            elif table.shares_page_of(first):
                self._copies.append((table.replace(first, page), page))
            else:
                table.append(page)
        return count

    def _free_pages(self, request_id: int) -> bool:
        """Remove one holder of pages, and return False if there are only older samples.

        The holder is a shared part of a prompt that no sample waits for, or else the youngest sample.
        """
        if self._remove_idle_prefix():
            return True
        youngest = self._active[-1]
        if youngest.request_id <= request_id:
            return False
        youngest.clear()
        youngest.prefix = None
        youngest.is_active = False
        self._active.remove(youngest)
        bisect.insort(self._waiting, youngest, key=_request_id)
        self.num_preemptions += 1
        return True

    def _remove_idle_prefix(self) -> bool:
        """Remove a cached shared part of a prompt that no sample waits for, and return False if there is none."""
        in_use = {id(sample.prefix) for sample in self._active}
        for prompt, prefix in self._prefixes.items():
            if id(prefix) not in in_use and prefix.table.num_pages:
                prefix.clear()
                del self._prefixes[prompt]
                return True
        return False


def _request_id(sample: _Sample) -> int:
    return sample.request_id
