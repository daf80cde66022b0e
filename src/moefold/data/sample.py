"""Samples that say more than their tokens: where documents begin, and which targets count in the loss.

A source of samples that has a `annotated_sample` beside its `sample` (a `AnnotatedSampleSource`) is all it takes: batches, masks
and the mean of the loss follow.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. The input at i predicts the target tokens[i + 1]."""

    tokens: NDArray[np.int64]
    """[S + 1]."""
    document_ids: NDArray[np.int32] | None = None
    """Number of the document of each token, [S + 1]; ascends, and neighbours with one number are of one document.

    Attention, and the positions that it counts, stay within a document, and no target is predicted from another one:
    the first token of a document never counts. Padding is a document of its own whose targets weigh nothing. None: all
    of the sample is one document.
    """
    weights: NDArray[Any] | None = None
    """Weight of each target, bool or floating [S], at least 0: 0 or False leaves it out. None: each weighs 1.

    The loss is the weighted mean over the targets of the global batch.
    """


class SampleSource(Protocol):
    """Numbered samples in the order of the data."""

    seq_len: int

    def __len__(self) -> int:
        """Samples in all."""
        ...

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of one sample, [seq_len + 1]."""
        ...


@runtime_checkable
class AnnotatedSampleSource(SampleSource, Protocol):
    """Numbered samples with marks; one without any is one document whose targets all count."""

    def annotated_sample(self, number: int) -> Sample:
        """One sample with its marks."""
        ...


@runtime_checkable
class TraceableSampleSource(Protocol):
    """Numbered samples whose text can be pointed at."""

    def origin(self, number: int) -> str:
        """Where a sample lies, for a message: a file and a place in it."""
        ...


@runtime_checkable
class DroppableSource(Protocol):
    """Numbered samples that lie in files, which can be given up; the other samples keep their numbers."""

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files, by their names in the recipe."""
        ...

    def is_dropped(self, number: int) -> bool:
        """Whether a sample has a token of a file that was given up."""
        ...

    @property
    def dropped_samples(self) -> list[range]:
        """The numbers of those that have, ascending and disjoint."""
        ...


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Some samples below each other."""

    tokens: NDArray[np.int64]
    """[count, S + 1]."""
    document_ids: NDArray[np.int32] | None = None
    """[count, S + 1]; None if and only if the source has no marks at all. So is `weights`."""
    weights: NDArray[np.float64] | None = None
    """[count, S]; as the source gave them, so first tokens of documents may still have some."""

    @property
    def inputs(self) -> NDArray[np.int64]:
        """What the model reads, [count, S]."""
        return np.ascontiguousarray(self.tokens[:, :-1])

    @property
    def labels(self) -> NDArray[np.int64]:
        """What it is to predict, [count, S]: the inputs shifted by one token."""
        return np.ascontiguousarray(self.tokens[:, 1:])

    def document_starts(self) -> NDArray[np.int64] | None:
        """Position at which the document of each input begins, [count, S]; None without marks."""
        if self.document_ids is None:
            return None
        is_first = np.diff(self.document_ids[:, :-1], axis=1, prepend=-1) != 0
        places = np.where(is_first, np.arange(is_first.shape[-1]), 0)
        starts: NDArray[np.int64] = np.maximum.accumulate(places, axis=1)
        return starts

    def target_weights(self) -> NDArray[np.float64] | None:
        """Weight of each target, [count, S], 0 where it begins a document; None without marks, where each weighs 1."""
        if self.document_ids is None or self.weights is None:
            return None
        weights: NDArray[np.float64] = self.weights * (self.document_ids[:, 1:] == self.document_ids[:, :-1])
        return weights


def stack_samples(samples: list[Sample], seq_len: int) -> SampleBatch:
    """Put samples of a marked source below each other.

    Raises:
        ValueError: a sample has arrays of the wrong length.
    """
    tokens = np.empty((len(samples), seq_len + 1), dtype=np.int64)
    documents = np.zeros((len(samples), seq_len + 1), dtype=np.int32)
    weights = np.ones((len(samples), seq_len), dtype=np.float64)
    for i, sample in enumerate(samples):
        tokens[i] = sample.tokens
        if sample.document_ids is not None:
            documents[i] = sample.document_ids
        if sample.weights is not None:
            weights[i] = sample.weights
    return SampleBatch(tokens, documents, weights)


def annotate_documents(tokens: NDArray[np.int64], end_id: int) -> Sample:
    """Number the documents of a sample by the token that ends each of them."""
    documents = np.zeros(len(tokens), dtype=np.int32)
    np.cumsum(tokens[:-1] == end_id, out=documents[1:])
    return Sample(tokens, documents)


class EodAnnotatedSamples:
    """Marks the documents of samples that hold the token that ends each of them."""

    def __init__(self, source: SampleSource, end_id: int) -> None:
        """Wrap a source.

        Args:
            source: samples that documents were packed into.
            end_id: the token behind every document; it belongs to the document that it ends.
        """
        self.seq_len = source.seq_len
        self._source = source
        self._end_id = end_id

    def __len__(self) -> int:
        """Samples in all."""
        return len(self._source)

    def sample(self, number: int) -> NDArray[np.int64]:
        """Tokens of one sample, int64 [seq_len + 1]."""
        return self._source.sample(number)

    def annotated_sample(self, number: int) -> Sample:
        """One sample with its documents."""
        return annotate_documents(self._source.sample(number), self._end_id)

    def origin(self, number: int) -> str:
        """Where a sample lies; empty if the source cannot say."""
        return self._source.origin(number) if isinstance(self._source, TraceableSampleSource) else ""

    def drop_files(self, names: Iterable[str]) -> None:
        """Give up files of the source."""
        if isinstance(self._source, DroppableSource):
            self._source.drop_files(names)

    def is_dropped(self, number: int) -> bool:
        """Whether a sample of the source is lost."""
        return isinstance(self._source, DroppableSource) and self._source.is_dropped(number)

    @property
    def dropped_samples(self) -> list[range]:
        """The lost samples of the source."""
        return self._source.dropped_samples if isinstance(self._source, DroppableSource) else []
