"""Samples packed from a stream of tokens without padding, with the documents of an index if it is used."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moefold.data.sample import Sample, SampleSource
from moefold.data.token_stream import TokenStream


class PackedSamples(SampleSource):
    """Documents packed without padding: sample i is tokens[i*S : i*S + S + 1], S = seq_len.

    Consecutive samples share one token, so every token except the first is a label exactly once.
    """

    def __init__(self, stream: TokenStream, seq_len: int, document_end: int = -1) -> None:
        """Split a stream into samples. A tail shorter than seq_len is not used."""
        self.stream = stream
        self.seq_len = seq_len
        self.document_end = document_end
        self.has_annotations = document_end >= 0

    def __len__(self) -> int:
        return max(0, (len(self.stream) - 1) // self.seq_len)

    def sample(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, [seq_len + 1]."""
        start = number * self.seq_len
        return self.stream.read(start, start + self.seq_len + 1)

    def origin(self, number: int) -> str:
        """Return file and position of a sample, or "" if the stream has no files."""
        return self.stream.describe_location(number * self.seq_len)

    def drop_files(self, names: Iterable[str]) -> None:
        """Drop files. Samples with any token of a dropped file are dropped."""
        self.stream.drop_files(names)

    def is_dropped(self, number: int) -> bool:
        """Return whether a sample has a token of a dropped file."""
        start = number * self.seq_len
        return self.stream.is_dropped(start, start + self.seq_len + 1)

    @property
    def dropped_samples(self) -> list[range]:
        """Ranges of the numbers of the dropped samples, ascending and disjoint."""
        dropped: list[range] = []
        for tokens in self.stream.dropped_tokens:
            # Sample i has the tokens i * S to i * S + S, both included.
            first = max(-(-(tokens.start - self.seq_len) // self.seq_len), dropped[-1].stop if dropped else 0)
            end = min((tokens.stop - 1) // self.seq_len + 1, len(self))
            if first < end:
                dropped.append(range(first, end))
        return dropped


class IndexAnnotatedSamples(PackedSamples):
    """Packed samples with document ids taken from the document index of their stream."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        super().__init__(stream, seq_len)
        self.has_annotations = True

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample with its document ids."""
        start = number * self.seq_len
        begins = self.stream.document_starts(start, start + self.seq_len + 1)
        return Sample(self.sample(number), np.cumsum(begins, dtype=np.int32))
