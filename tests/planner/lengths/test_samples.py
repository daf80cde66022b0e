"""Samples of documents: each has S tokens, no document is lost at a cut, and equal seeds give equal samples."""

import numpy as np
import pytest

from moefold.planner.lengths.distribution import ListedLengths, load_distribution
from moefold.planner.lengths.samples import RecordedSamples, StreamedSamples, effective_length
from tests.planner.lengths.equal_documents import equal_documents


def test_the_stream_is_cut_into_samples():
    assert StreamedSamples(ListedLengths("", "", [3])).draw(8, 3, 0) == [(3, 3, 2), (1, 3, 3, 1), (2, 3, 3)]


def test_a_document_longer_than_a_sample_fills_it():
    assert StreamedSamples(ListedLengths("", "", [10])).draw(4, 5, 0) == [(4,), (4,), (2, 2), (4,), (4,)]


@pytest.mark.parametrize("name", ["wikipedia", "wlb"])
def test_samples_are_full_and_repeatable(name):
    samples = StreamedSamples(load_distribution(name))
    drawn = samples.draw(8192, 50, seed=3)
    assert [sum(sample) for sample in drawn] == [8192] * 50
    assert min(map(min, drawn)) >= 1
    assert samples.draw(8192, 50, seed=3) == drawn
    assert samples.draw(8192, 50, seed=4) != drawn


def test_recorded_samples_are_drawn_with_replacement():
    recorded = RecordedSamples("", "", ((4, 4), (8,)))
    drawn = recorded.draw(8, 100, 0)
    assert set(drawn) == {(4, 4), (8,)}
    assert drawn == recorded.draw(8, 100, 0)


def test_the_effective_length_is_the_length_of_equal_documents():
    assert effective_length(equal_documents(64, 16).draw(64, 3, 0)) == 16
    assert effective_length([(2, 6)]) == pytest.approx((4 + 36) / 8)


def test_the_first_lengths_never_change():
    # A prediction is repeatable only if these numbers are the same under every version of NumPy.
    drawn = StreamedSamples(load_distribution("wikipedia")).draw(4096, 2, seed=0)
    assert drawn == FIRST
    assert np.sum(drawn[0]) == 4096


FIRST = [(457, 823, 562, 450, 260, 656, 279, 609), (1363, 2733)]
