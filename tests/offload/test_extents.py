from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.offload.extents import ALIGNMENT_BYTES, Extents

SIZES = st.integers(1, 6 * ALIGNMENT_BYTES)


@settings(deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 8)), max_size=60), st.integers(0, 40))
def test_extents_never_overlap_and_nothing_is_lost(wishes, limit):
    """Take some, drop some, in any order: what is held is apart and within the limit, and in the end all is free."""
    extents, held = Extents(limit * ALIGNMENT_BYTES), []
    for size, dropped in wishes:
        extent = extents.take(size)
        if extent is None:
            assert extents.end + size > limit * ALIGNMENT_BYTES
        else:
            assert extent.stop - extent.start >= size
            assert extent.stop <= limit * ALIGNMENT_BYTES
            held.append(extent)
        spans = sorted((e.start, e.stop) for e in held)
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
        assert extents.end >= max((stop for _, stop in spans), default=0)
        if dropped < len(held):
            held.pop(dropped)
        extent = None
    held.clear()
    assert extents.end == 0


def test_the_smallest_hole_that_fits_is_filled_first():
    extents = Extents()
    sizes = [n * ALIGNMENT_BYTES for n in (3, 1, 2, 1, 1)]
    held = [extents.take(size) for size in sizes]
    large, small = held[0].start, held[2].start
    held[0] = held[2] = None
    kept = extents.take(2 * ALIGNMENT_BYTES)
    assert kept.start == small
    other = extents.take(3 * ALIGNMENT_BYTES)
    assert other.start == large


def test_nothing_ends_beyond_where_the_file_was_found_full():
    extents = Extents()
    first, second = extents.take(ALIGNMENT_BYTES), extents.take(ALIGNMENT_BYTES)
    extents.stop_at(second.start)
    second = None
    assert extents.take(ALIGNMENT_BYTES) is None
    first = None
    assert extents.take(ALIGNMENT_BYTES).start == 0
    assert (first, second) == (None, None)
