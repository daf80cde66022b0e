"""Extents of an offload file never overlap, and the smallest hole that fits is filled first."""

from hypothesis import given
from hypothesis import strategies as st

from moefold.offload.ssd import ALIGNMENT_BYTES, FileAllocator

SIZES = st.integers(1, 6 * ALIGNMENT_BYTES)


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 8), st.none() | st.integers(0, 40)), max_size=60),
    st.integers(0, 40),
)
def test_extents_never_overlap_and_nothing_is_lost(wishes, limit):
    """Take some, drop some, find the file full, in any order: held extents do not overlap, none is beyond the limit,
    room that is there is found, and in the end all is free."""
    extents, held = FileAllocator(limit * ALIGNMENT_BYTES), []
    for size, dropped, full_at in wishes:
        extent = extents.allocate(size)
        if extent is None:
            assert not _has_room(held, size, limit)
        else:
            assert extent.stop - extent.start >= size
            assert extent.stop <= limit * ALIGNMENT_BYTES
            held.append(extent)
        if full_at is not None:
            extents.limit_to(full_at * ALIGNMENT_BYTES)
            limit = min(limit, full_at)
        spans = sorted((e.start, e.stop) for e in held)
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
        assert extents.end >= max((stop for _, stop in spans), default=0)
        if dropped < len(held):
            held.pop(dropped)
        extent = None
    held.clear()
    assert extents.end == 0


def _has_room(held, size, limit):
    """Return whether a run of free blocks below the limit, which counts blocks, is long enough."""
    used = {block for e in held for block in range(e.start // ALIGNMENT_BYTES, e.stop // ALIGNMENT_BYTES)}
    free = "".join(" " if block in used else "." for block in range(limit))
    return "." * -(-size // ALIGNMENT_BYTES) in free


def test_the_smallest_hole_that_fits_is_filled_first():
    extents = FileAllocator()
    sizes = [n * ALIGNMENT_BYTES for n in (3, 1, 2, 1, 1)]
    held = [extents.allocate(size) for size in sizes]
    large, small = held[0].start, held[2].start
    held[0] = held[2] = None
    kept = extents.allocate(2 * ALIGNMENT_BYTES)
    assert kept.start == small
    other = extents.allocate(3 * ALIGNMENT_BYTES)
    assert other.start == large


def test_nothing_ends_beyond_where_the_file_was_found_full():
    extents = FileAllocator()
    first, second = extents.allocate(ALIGNMENT_BYTES), extents.allocate(ALIGNMENT_BYTES)
    extents.limit_to(second.start)
    second = None
    assert extents.allocate(ALIGNMENT_BYTES) is None
    first = None
    assert extents.allocate(ALIGNMENT_BYTES).start == 0
    assert (first, second) == (None, None)


def test_a_hole_beyond_where_the_file_was_found_full_hides_none_below():
    extents = FileAllocator()
    sizes = [n * ALIGNMENT_BYTES for n in (2, 10, 1, 5)]
    held = [extents.allocate(size) for size in sizes]
    extents.limit_to(held[1].start + 5 * ALIGNMENT_BYTES)
    held[0] = held[2] = None
    found = extents.allocate(ALIGNMENT_BYTES)
    assert (found.start, found.stop) == (0, ALIGNMENT_BYTES)
    assert extents.allocate(2 * ALIGNMENT_BYTES) is None
