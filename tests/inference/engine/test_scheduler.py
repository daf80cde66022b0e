"""Test that passes compute every token once, in order, in pages of its own sample, whatever the limits are."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.inference.engine.pages import PagePool, PageTable, PageTableReader, pages_for
from moefold.inference.engine.requests import Request
from moefold.inference.engine.scheduler import Pass, PassLimits, PassScheduler
from moefold.integer_hash import hash_ints

EOS = 0


class HashModel:
    """A cache of tokens in pages, and a "model" whose next token is a hash of all tokens that the pages hold.

    The recurrent state of a sequence is the list of its tokens, which must be those in the pages.
    """

    def __init__(self, num_pages: int, page_positions: int) -> None:
        self._page_positions = page_positions
        self._pages = [[-1] * page_positions for _ in range(num_pages)]
        self._states: dict[int, list[int]] = {}

    def run(self, work: Pass) -> dict[int, int]:
        """Return the drawn tokens by the number of their sample."""
        for source, target in work.copies:
            self._pages[target] = list(self._pages[source])
        self._states |= {target: self._states[source] for source, target in work.state_copies}
        assert len({segment.state_slot for segment in work.segments}) == len(work.segments)
        for segment in work.segments:
            before = self._states[segment.state_slot] if segment.first else []
            self._states[segment.state_slot] = before + segment.tokens
            for position, token in enumerate(segment.tokens, segment.first):
                page = self._pages[segment.table.page_of(position)]
                page[position % self._page_positions] = token
        for segment in work.segments:
            length = segment.first + len(segment.tokens)
            assert self._states[segment.state_slot] == self._history(segment.table, length)
        return {s.request_id: self._next(s.table, s.first + len(s.tokens)) for s in work.segments if s.request_id >= 0}

    def _history(self, table: PageTable, length: int) -> list[int]:
        return [self._pages[table.page_of(i)][i % self._page_positions] for i in range(length)]

    def _next(self, table: PageTable, length: int) -> int:
        return next_token(self._history(table, length))


def next_token(history: list[int]) -> int:
    """The token after a text: a hash of it."""
    return hash_ints(*history) % 40


def expected(request: Request) -> list[int]:
    """The new tokens of a sample by itself."""
    history = list(request.prompt)
    new: list[int] = []
    while len(new) < request.max_tokens and (not new or new[-1] not in request.eos_ids):
        new.append(next_token(history + new))
    return new


def run(requests: list[Request], limits: PassLimits, arrivals: list[int]) -> tuple[dict[int, list[int]], PassScheduler]:
    """The new tokens of all samples. Sample i is added before pass arrivals[i]."""
    scheduler = PassScheduler(limits)
    model = HashModel(limits.num_pages, limits.page_positions)
    found: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    step = 0
    while scheduler.has_work or step <= max(arrivals):
        for i, request in enumerate(requests):
            if arrivals[i] == step:
                scheduler.add(i, request)
        step += 1
        if not scheduler.has_work:
            continue
        work = scheduler.next_pass()
        assert 0 < work.num_tokens <= limits.pass_tokens
        assert len({s.table for s in work.segments}) <= limits.slots
        for number, token in model.run(work).items():
            request = requests[number]
            found[number].append(token)
            if token in request.eos_ids or len(found[number]) == request.max_tokens:
                scheduler.finish(number)
            else:
                scheduler.append(number, token)
    return found, scheduler


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Request], PassLimits, list[int]]:
    """Requests of a few prompts, limits that may be as tight as the longest sample, and passes before arrival."""
    lengths = st.integers(1, 3 * PAGE_POSITIONS + 1)
    sizes = draw(st.lists(lengths, min_size=1, max_size=3))
    prompts = [tuple(hash_ints(i, n) % 40 for n in range(size)) for i, size in enumerate(sizes)]
    requests = [
        Request(
            prompt=draw(st.sampled_from(prompts)),
            max_tokens=draw(st.integers(1, PAGE_POSITIONS + 5)),
            eos_ids=frozenset({EOS}) if draw(st.booleans()) else frozenset(),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]
    # Larger and smaller ones than the page of a CPU.
    page_positions = draw(st.sampled_from((PAGE_POSITIONS, 16, 100)))
    least = max(pages_for(request.max_positions, page_positions) for request in requests)
    slots = draw(st.integers(1, 12))
    limits = PassLimits(
        slots=slots,
        pass_tokens=draw(st.integers(slots, slots + 150)),
        num_pages=draw(st.integers(least, least + 12)),
        share_prompts=draw(st.booleans()),
        page_positions=page_positions,
    )
    arrivals = draw(st.lists(st.integers(0, 30), min_size=len(requests), max_size=len(requests)))
    return requests, limits, arrivals


@given(schedules())
@settings(max_examples=60)
def test_no_schedule_changes_a_token(schedule):
    requests, limits, arrivals = schedule
    found, scheduler = run(requests, limits, arrivals)
    assert found == {i: expected(request) for i, request in enumerate(requests)}
    assert scheduler.pool.num_free == limits.num_pages


def test_samples_of_one_prompt_compute_it_once():
    prompt = tuple(range(200))
    requests = [Request(prompt=prompt, max_tokens=1) for _ in range(8)]
    limits = PassLimits(slots=8, pass_tokens=512, num_pages=40, page_positions=PAGE_POSITIONS)
    scheduler = PassScheduler(limits)
    for i, request in enumerate(requests):
        scheduler.add(i, request)
    first = scheduler.next_pass()
    assert [len(segment.tokens) for segment in first.segments] == [199]
    second = scheduler.next_pass()
    assert [len(segment.tokens) for segment in second.segments] == [1] * 8
    # The page of positions 192 to 198 is copied for each sample that writes position 199.
    assert len(second.copies) == 8
    assert scheduler.pool.num_free == 40 - 4 - 8


def test_the_youngest_sample_gives_up_its_pages():
    # Three pages in all: the first sample needs a second page, and the other one holds two.
    requests = [Request(prompt=(1,) * 60, max_tokens=20), Request(prompt=(2,) * 70, max_tokens=20)]
    limits = PassLimits(slots=2, pass_tokens=128, num_pages=3, page_positions=PAGE_POSITIONS)
    found, scheduler = run(requests, limits, [0, 0])
    assert scheduler.num_preemptions == 1
    assert found == {i: expected(request) for i, request in enumerate(requests)}


def test_a_decoded_sample_does_not_wait_for_a_long_prompt():
    scheduler = PassScheduler(PassLimits(slots=2, pass_tokens=16, num_pages=8, page_positions=PAGE_POSITIONS))
    scheduler.add(0, Request(prompt=(1,), max_tokens=9))
    scheduler.next_pass()
    scheduler.append(0, 5)
    scheduler.add(1, Request(prompt=(2,) * 100, max_tokens=1))
    work = scheduler.next_pass()
    assert [len(segment.tokens) for segment in work.segments] == [1, 15]
    assert [segment.request_id for segment in work.segments] == [0, -1]


def test_a_shared_page_is_freed_with_its_last_reference():
    pool = PagePool(2, PAGE_POSITIONS)
    table = PageTable(pool, 2)
    page = pool.take()
    assert page is not None
    table.append(page)
    other = PageTable(pool, 2)
    other.share_from(table, 10)
    assert other.shares_page_of(3)
    table.clear()
    assert pool.num_free == 1
    assert not other.shares_page_of(3)
    other.clear()
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="is free"):
        pool.release(page)


def test_page_tables_are_read_again_whenever_they_change():
    # Preemptions, shared prompts, copies of pages, and samples that end between others.
    limits = PassLimits(slots=6, pass_tokens=96, num_pages=9, page_positions=PAGE_POSITIONS)
    scheduler = PassScheduler(limits)
    lengths = [40, 90, 130, 70, 200, 20, 90, 65]
    for i, max_tokens in enumerate(lengths):
        scheduler.add(i, Request(prompt=(i // 4,) * (50 + i // 4), max_tokens=max_tokens))
    reader = PageTableReader(scheduler.pool)
    counts = Counter[int]()
    num_kept = 0
    before = None
    while scheduler.has_work:
        segments = scheduler.next_pass().segments
        pages = reader.read([segment.table for segment in segments])
        num_kept += pages is before
        before = pages
        for row, segment in zip(pages, segments, strict=True):
            num_pages = segment.table.num_pages
            assert row[:num_pages].tolist() == segment.table.pages[:num_pages].tolist()
            assert not row[num_pages:].any()
            assert pages.shape[1] == max(other.table.num_pages for other in segments)
            if (request_id := segment.request_id) >= 0:
                counts[request_id] += 1
                if counts[request_id] == lengths[request_id]:
                    scheduler.finish(request_id)
                else:
                    scheduler.append(request_id, 7)
    assert scheduler.num_preemptions
    assert num_kept > 100
