"""Pages that a cache holds and that requests need."""

from collections import Counter
from collections.abc import Sequence
from heapq import nlargest

from moefold.cost.kv_cache import CacheSizes, num_state_slots
from moefold.errors import ConfigError, Setting
from moefold.inference.engine.pages import pages_for
from moefold.inference.engine.requests import EngineSettings, Request

MIN_PAGE_BYTES = 1024
"""Minimum bytes counted for a page: with only linear attention, a page consists of entries in the page tables."""


def cache_pages(sizes: CacheSizes, settings: EngineSettings) -> int | None:
    """Return the pages that fit into the cache of a rank, at least one; None if it is as large as the requests need."""
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
    """Return the positions of the longest sample, prompt and new tokens; 0 without requests."""
    return max((request.max_positions for request in requests), default=0)


def check_longest(num_positions: int, num_pages: int, page_positions: int) -> None:
    """Raise ConfigError if a cache of this size is too small for a sample of the given positions."""
    if pages_for(num_positions, page_positions) > num_pages:
        raise ConfigError(
            f"the cache of {num_pages * page_positions} tokens holds no sample of {num_positions} (prompt and new "
            f"tokens); set a larger {Setting('rollout.cache_gib')}, or fewer new tokens"
        )
