"""Samples with optional document ids (attention and loss boundaries) and target weights (loss mask).

A source only implements `annotated_sample`: batches, attention masks and the weighted mean of the loss follow.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUILTIN_COLUMNS = frozenset(
    {
        "tokens",
        "labels",
        "weights",
        "sample_ids",
        "token_samples",
        "positions",
        "mtp_labels",
        "mtp_weights",
        "document_starts",
        "token_weights",
    }
)
"""Built-in columns of a batch."""
RESERVED_COLUMNS = BUILTIN_COLUMNS | {"x", "document_bounds"}
"""Names that a program's columns may not have: built-in columns, and arguments of stages."""
PADDING_DOCUMENT = 128
"""Maximum tokens of a document of padding."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample. The input at position i predicts the target tokens[i + 1]."""

    tokens: NDArray[np.int64]
    """[S + 1]."""
    document_ids: NDArray[np.int32] | None = None
    """Document number of each token, [S + 1], non-decreasing. Consecutive tokens with equal numbers share a document.

    Attention and position ids stay within a document, and no target is predicted across documents: the first token of a
    document is never a target. Padding is a document of its own, see `is_padding`. None means one document.
    """
    weights: NDArray[Any] | None = None
    """Weight of each target, bool or floating [S], at least 0: 0 or False masks it. None if all weights are 1.

    The loss is the weighted mean over the targets of the global batch.
    """
    weight_scale: NDArray[np.float64] | None = None
    """Factor of each target's weight after the division by the sum of all weights of the global batch, [S]. None means
    1."""
    is_padding: NDArray[np.bool_] | None = None
    """Tokens that only fill the sample, [S + 1], or None if there are no such tokens.

    MoE layers do not route them. A token whose target has weight 0, such as a token of a prompt, is not padding. It is
    context of other tokens, is routed, and counts in the load of the experts. Padding is never a target and predicts
    none, whatever its weights.
    """
    token_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Other columns of the batch for a loss function, one value or more per input token, [..., S]."""
    sample_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Other columns of the batch with values per sample, of any shape."""

    @property
    def is_annotated(self) -> bool:
        """Return whether the sample has other fields than tokens."""
        has_arrays = any(x is not None for x in (self.document_ids, self.weights, self.weight_scale, self.is_padding))
        return has_arrays or bool(self.token_columns) or bool(self.sample_columns)


class SampleSource(ABC):
    """Numbered samples in the order of the data. A subclass defines `sample` or `annotated_sample`, or both."""

    seq_len: int
    document_end: int = -1
    """Token that ends a document and belongs to it, for document numbers. -1: none."""
    has_annotations: bool = False
    """Samples may have document ids or target weights."""
    fill_fraction: float = 1.0
    """Share of all samples' inputs that are not padding, 0 to 1. For parts of the data it is an estimate."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, int64 [seq_len + 1]. The errors are the errors of `annotated_sample`."""
        return self.annotated_sample(number).tokens

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample with its annotations, if it has any."""
        tokens = self.sample(number)
        return annotate_documents(tokens, self.document_end) if self.document_end >= 0 else Sample(tokens)

    def origin(self, number: int) -> str:
        """Return file and position of a sample, for a message, or "" if they are unknown."""
        return ""

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files, by their names in the recipe. Does nothing if samples do not come from files."""
        return

    def is_dropped(self, number: int) -> bool:
        """Return whether a sample has a token of a dropped file and cannot be used."""
        return False

    @property
    def dropped_samples(self) -> list[range]:
        """Ranges of the numbers of the dropped samples, ascending and disjoint. The others keep their numbers."""
        return []


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Stacked samples."""

    tokens: NDArray[np.int64]
    """[count, S + 1]."""
    document_ids: NDArray[np.int32] | None = None
    """[count, S + 1], or None if and only if the source has no annotations. The same holds for `weights`."""
    weights: NDArray[np.float64] | None = None
    """[count, S], from the source, so first tokens of documents may still have a nonzero weight."""
    weight_scale: NDArray[np.float64] | None = None
    """[count, S], or None if no sample has a scale."""
    is_padding: NDArray[np.bool_] | None = None
    """[count, S + 1], or None if no sample has padding."""
    token_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[count, ..., S] each."""
    sample_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[count, ...] each."""

    @property
    def inputs(self) -> NDArray[np.int64]:
        """Input ids, [count, S]."""
        return np.ascontiguousarray(self.tokens[:, :-1])

    @property
    def labels(self) -> NDArray[np.int64]:
        """Target ids, [count, S]: the inputs shifted by one token."""
        return np.ascontiguousarray(self.tokens[:, 1:])

    def pad_out(self, is_unused: NDArray[np.bool_]) -> "SampleBatch":
        """Return the batch with the samples of a mask, [count], turned into padding."""
        padding = np.zeros(self.tokens.shape, dtype=np.bool_) if self.is_padding is None else self.is_padding
        return replace(self, is_padding=padding | is_unused[:, None])

    def is_token(self) -> NDArray[np.bool_]:
        """Return the mask of inputs that are not padding, [count, S]."""
        if self.is_padding is None:
            return np.ones(self.inputs.shape, dtype=np.bool_)
        return ~self.is_padding[:, :-1]

    def document_starts(self) -> NDArray[np.int64] | None:
        """Return the position where the document of each input begins, [count, S], or None without annotations.

        Documents of padding are split into short documents: nothing reads their attention, which then costs little.
        """
        if self.document_ids is None:
            return None
        is_first = np.diff(self.document_ids[:, :-1], axis=1, prepend=-1) != 0
        positions = np.arange(is_first.shape[-1])
        starts: NDArray[np.int64] = np.maximum.accumulate(np.where(is_first, positions, 0), axis=1)
        if self.is_padding is None:
            return starts
        # Documents of all samples together, each identified by its first token.
        first = (starts + np.arange(len(starts))[:, None] * len(positions)).ravel()
        has_tokens = np.bincount(first, ~self.is_padding[:, :-1].ravel(), starts.size)[first] > 0
        pieces = starts + (positions - starts) // PADDING_DOCUMENT * PADDING_DOCUMENT
        return np.where(has_tokens.reshape(starts.shape), starts, pieces)

    def target_weights(self) -> NDArray[np.float64] | None:
        """Return the target weights, [count, S], 0 for first tokens of documents and padding, or None if all are 1."""
        if self.document_ids is None or self.weights is None:
            return None
        weights: NDArray[np.float64] = self.weights * (self.document_ids[:, 1:] == self.document_ids[:, :-1])
        return weights if self.is_padding is None else weights * ~(self.is_padding[:, 1:] | self.is_padding[:, :-1])


def stack_samples(samples: list[Sample], seq_len: int) -> SampleBatch:
    """Stack samples of an annotated source.

    Raises:
        ValueError: a sample has arrays of the wrong length, other columns than the first sample, or a reserved name.
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
    scale = None
    if any(sample.weight_scale is not None for sample in samples):
        ones = np.ones(seq_len)
        scale = np.stack([ones if sample.weight_scale is None else sample.weight_scale for sample in samples])
    padding = None
    if any(sample.is_padding is not None for sample in samples):
        padding = np.zeros((len(samples), seq_len + 1), dtype=np.bool_)
        for i, sample in enumerate(samples):
            if sample.is_padding is not None:
                padding[i] = sample.is_padding
    token_columns = _stack_columns([sample.token_columns for sample in samples])
    sample_columns = _stack_columns([sample.sample_columns for sample in samples])
    for name, values in token_columns.items():
        if values.shape[-1] != seq_len:
            raise ValueError(f"the column {name!r} has {values.shape[-1]} values per sample, and needs {seq_len}")
    names = [*token_columns, *sample_columns]
    clashes = {name for name in names if name in RESERVED_COLUMNS or names.count(name) > 1}
    if clashes:
        raise ValueError(f"the column names {sorted(clashes)} are taken; choose other names")
    return SampleBatch(tokens, documents, weights, scale, padding, token_columns, sample_columns)


def _stack_columns(columns: list[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Stack the columns of samples, which must have the same columns."""
    for row in columns:
        if row.keys() != columns[0].keys():
            raise ValueError(f"samples of one batch have the columns {sorted(columns[0])} and {sorted(row)}")
    return {name: np.stack([row[name] for row in columns]) for name in columns[0]}


def annotate_documents(tokens: NDArray[np.int64], end_id: int) -> Sample:
    """Return the document number of each token of a sample, from its end tokens."""
    documents = np.zeros(len(tokens), dtype=np.int32)
    np.cumsum(tokens[:-1] == end_id, out=documents[1:])
    return Sample(tokens, documents)


def fill_up(arrays: Sequence[NDArray[Any]], size: int, value: float) -> NDArray[Any]:
    """Return concatenated arrays, filled to a size with a value."""
    joined = np.concatenate(arrays)
    return np.concatenate((joined, np.full(size - len(joined), value, joined.dtype)))


def packed_sample(arrays: Sequence[NDArray[np.int64]], size: int, pad_id: int, **annotations: Any) -> Sample:
    """Return a sample of whole documents, with padding as its last one. Annotations are other fields of `Sample`."""
    lengths = [len(array) for array in arrays]
    filled = sum(lengths)
    documents = np.repeat(np.arange(len(arrays) + 1, dtype=np.int32), [*lengths, size - filled])
    return Sample(fill_up(arrays, size, pad_id), documents, is_padding=np.arange(size) >= filled, **annotations)


class ReferenceLogProbs:
    """Log-probabilities of the sequences of each pair under the reference model, once they are known.

    `values` is float64 [pairs, 2]: sums over the targets of both sequences, whose numbers are `num_targets`.
    """

    def __init__(self, num_targets: NDArray[np.int64]) -> None:
        self._num_targets = num_targets
        self.values: NDArray[np.float64] = np.zeros(num_targets.shape)

    def fill_uniform(self, vocab_size: int) -> None:
        """Use a reference in which every token is equally probable, for comparisons without a forward pass."""
        self.values = self._num_targets.astype(np.float64) * -math.log(vocab_size)
