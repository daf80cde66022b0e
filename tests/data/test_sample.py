"""Marks of samples: where documents begin, which targets count."""

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.held_out import IndexRanges
from moefold.data.packed_samples import PackedSamples
from moefold.data.sample import PADDING_DOCUMENT, Sample, stack_samples
from moefold.data.sampler import SplitSampler
from moefold.data.token_stream import TokenStream


class Stream(TokenStream):
    """Token ids 0 .. n-1, modulo 5."""

    def __len__(self) -> int:
        return 61

    def read(self, start: int, stop: int):
        return np.arange(start, stop, dtype=np.int64) % 5


def test_documents_end_with_their_token():
    source = PackedSamples(Stream(), 12, document_end=3)
    assert source.has_annotations
    sample = source.annotated_sample(0)
    assert sample.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    assert sample.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert sample.document_ids.dtype == np.int32
    assert len(source) == 5
    assert np.array_equal(source.sample(2), source.annotated_sample(2).tokens)


def test_starts_and_weights_worked_by_hand():
    documents = np.array([[0, 0, 0, 4, 4, 4, 7], [2, 3, 4, 4, 4, 4, 4]], dtype=np.int32)
    weights = [np.array([True, False, True, True, True, True]), np.array([1, 2, 0.5, 0, 1, 3])]
    tokens = np.arange(7)
    batch = stack_samples([Sample(tokens, d, w) for d, w in zip(documents, weights, strict=True)], 6)
    assert batch.document_starts().tolist() == [[0, 0, 0, 3, 3, 3], [0, 1, 2, 2, 2, 2]]
    assert batch.target_weights().tolist() == [[1, 0, 0, 1, 1, 0], [0, 0, 0.5, 0, 1, 3]]
    assert batch.inputs.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_sample_without_marks_is_one_document_that_counts():
    batch = stack_samples([Sample(np.arange(5))], 4)
    assert batch.document_starts().tolist() == [[0, 0, 0, 0]]
    assert batch.target_weights().tolist() == [[1, 1, 1, 1]]


def test_a_source_without_marks_pays_nothing():
    batch = SplitSampler(PackedSamples(Stream(), 12), IndexRanges((range(5),)), order_key=None).batch(0, 3)
    assert batch.document_starts() is None
    assert batch.target_weights() is None


@pytest.mark.parametrize("part", ["train", "validation"])
def test_document_end_marks_every_kind_of_data(part):
    def data(end: int):
        config = DataConfig(kind="synthetic", document_end=end, validation_fraction=0.5)
        return getattr(DataRequest(config, seq_len=40, vocab_size=8, seed=1).open(), part)

    plain, marked = data(-1), data(2)
    assert not plain.has_annotations
    assert marked.has_annotations
    batch = marked.batch(3, 4)
    assert np.array_equal(batch.tokens, plain.batch(3, 4).tokens)
    assert batch.document_ids.max() > 1
    assert (np.diff(batch.document_ids) == (batch.tokens[:, :-1] == 2)).all()


def test_arrays_of_the_wrong_length_do_not_pass():
    with pytest.raises(ValueError, match="broadcast"):
        stack_samples([Sample(np.arange(5), weights=np.ones(5))], 4)


def test_columns_are_stacked_by_name() -> None:
    values = np.arange(4.0)
    batch = stack_samples(
        [Sample(np.arange(5), token_columns={"a": values}, sample_columns={"b": np.float64(2)})] * 2, 4
    )
    assert batch.token_columns["a"].tolist() == [values.tolist()] * 2
    assert batch.sample_columns["b"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"a": np.zeros(5)}, "5 values per sample, and needs 4"), ({"labels": np.zeros(4)}, "labels")],
)
def test_wrong_columns_are_rejected(columns: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack_samples([Sample(np.arange(5), token_columns=columns)], 4)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"document_bounds": np.zeros(4)}, {"document_bounds": np.zeros(4)}, "'document_bounds'.* are taken"),
        ({"advantages": np.zeros(4)}, {}, "have the columns"),
        ({"advantages": np.zeros(3)}, {"advantages": np.zeros(3)}, "3 values per sample, and needs 4"),
    ],
)
def test_columns_that_do_not_fit_are_rejected(first, second, message):
    samples = [Sample(np.arange(5), token_columns=columns) for columns in (first, second)]
    with pytest.raises(ValueError, match=message):
        stack_samples(samples, 4)


def test_a_name_is_a_column_per_token_or_per_sample():
    sample = Sample(np.arange(5), token_columns={"score": np.zeros(4)}, sample_columns={"score": np.zeros(())})
    with pytest.raises(ValueError, match="taken"):
        stack_samples([sample], 4)


def test_documents_of_only_padding_are_short():
    length = 3 * PADDING_DOCUMENT
    places = np.arange(length + 1)
    # A long document, padding of its own, and padding inside a document; then a sample of only padding.
    documents = (places >= 200).astype(np.int32)
    padded = stack_samples(
        [
            Sample(places, documents, is_padding=places >= 200),
            Sample(places, documents, is_padding=(places < 10) | (places == length)),
            Sample(places, np.zeros_like(documents), is_padding=places >= 0),
        ],
        length,
    )
    starts = padded.document_starts()
    assert starts is not None
    assert [np.unique(row).tolist() for row in starts] == [[0, 200, 328], [0, 200], [0, 128, 256]]
    assert (starts <= places[:-1]).all()
    plain = stack_samples([Sample(places, documents)], length).document_starts()
    assert plain is not None
    assert np.unique(plain).tolist() == [0, 200]
