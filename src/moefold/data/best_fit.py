"""Best-fit packing of documents for pretraining (arXiv:2404.10830): documents that fit into a sample are not split.

Documents longer than a sample are split into parts of a whole sample and a rest. The documents and rests of a window of
the stream are packed by best fit decreasing. The rest of a sample is padding. The packing is computed once, stored in
the cache, and memory-mapped: sample n is the same on every rank, and the position of a run is a number of samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from moefold.cache_dir import entry_key
from moefold.config.sections.data import DataConfig
from moefold.data.bin_packing import pack_best_fit
from moefold.data.sample import Sample, SampleSource, packed_sample
from moefold.data.shard_reader import ShardReader
from moefold.data.token_cache import cached_ids, npy_header
from moefold.data.token_file import TokenFile, document_ends_path, read_npy_header
from moefold.data.token_stream import TokenFileStream, TokenStream
from moefold.errors import ConfigError
from moefold.message_text import Problem

FORMAT_VERSION = 1
WINDOW_TOKENS = 2**24
"""Minimum tokens of the documents that are packed together."""
WINDOW_SAMPLES = 256
"""Minimum samples of a window, because its last samples may be poorly filled."""
WINDOW_DOCUMENTS = 2**17
"""Maximum number of documents that are packed together."""
_CHUNK_TOKENS = 2**22
_CHUNK_PARTS = 2**20


@dataclass(frozen=True)
class DocumentBoundaries:
    """Places where documents begin in a stream of tokens."""

    stream: TokenStream
    end_id: int | None
    """Token that ends a document and belongs to it, or None if the index by `moefold tokenize` has the boundaries."""

    @property
    def identity(self) -> tuple[str | int, ...]:
        """Return values that distinguish these boundaries from other boundaries of the same stream."""
        return ("index",) if self.end_id is None else ("end token", self.end_id)

    def starts(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens first .. stop - 1 that begin a document, ascending. Token 0 always does."""
        starts: NDArray[np.int64]
        if self.end_id is None:
            starts = np.flatnonzero(self.stream.document_starts(first, stop)) + first
            return starts
        before = max(0, first - 1)
        starts = np.flatnonzero(self.stream.read(before, stop - 1) == self.end_id) + before + 1
        return starts if first else np.concatenate(([0], starts))


@dataclass
class PackingCounts:
    """Counts of a packing, int64 each, in the order of the file."""

    num_documents: int = 0
    num_split: int = 0
    """Documents of more than S + 1 tokens."""
    num_single: int = 0
    """Documents of one token, which have no target and are not used."""
    num_samples: int = 0
    num_tokens: int = 0
    """Tokens in the samples, without padding."""

    def describe(self, sample_tokens: int) -> str:
        """Return a log message. A sample has `sample_tokens` tokens."""
        filled = self.num_tokens / max(1, self.num_samples * sample_tokens)
        return (
            f"data.packing='best_fit': {self.num_documents} documents, {self.num_split} split as they have more than "
            f"{sample_tokens} tokens, {self.num_single} of one token left out; {self.num_samples} samples, "
            f"{100 * (1 - filled):.2f} % padding"
        )


_NUM_COUNTS = len(fields(PackingCounts))


class BestFitSamples(SampleSource):
    """Samples of whole documents, parts of long ones, and padding.

    A document of n > S + 1 tokens is split into parts of S + 1 tokens and a rest. Neighbouring parts share one token,
    so that every token of a document except the first is a target exactly once. Attention and positions are within a
    part. Samples share no other token.

    The file of the packing has `PackingCounts`, then two numbers for each part of a document, sample by sample. The
    first is 2 * first token, plus 1 if the part begins a sample. The second is the number of tokens.
    """

    has_annotations = True

    def __init__(self, stream: TokenStream, packing: ShardReader, seq_len: int, pad_id: int) -> None:
        self.seq_len = seq_len
        self.counts = PackingCounts(*packing[:_NUM_COUNTS].tolist())
        self._stream = stream
        self._packing = packing
        self._pad_id = pad_id
        num_parts = (len(packing) - _NUM_COUNTS) // 2
        begins = [
            first + np.flatnonzero(self._read_parts(first, min(first + _CHUNK_PARTS, num_parts))[:, 0] & 1)
            for first in range(0, num_parts, _CHUNK_PARTS)
        ]
        self._first_parts = np.concatenate([*begins, [num_parts]]).astype(np.int64)
        # An estimate: the last token of a sample is not an input, but counts here.
        self.fill_fraction = min(1.0, self.counts.num_tokens / max(1, len(self) * (self.seq_len + 1)))

    def __len__(self) -> int:
        return len(self._first_parts) - 1

    def annotated_sample(self, number: int) -> Sample:
        """Return one sample. Its padding is the last document."""
        documents = [self._stream.read(first, first + length) for first, length in self._parts_of(number)]
        return packed_sample(documents, self.seq_len + 1, self._pad_id)

    def origin(self, number: int) -> str:
        """Return file and position of the first document of a sample, or "" if the stream has no files."""
        return self._stream.describe_location(self._parts_of(number)[0][0])

    def _parts_of(self, number: int) -> list[tuple[int, int]]:
        """Return first token and number of tokens of the parts of a sample."""
        rows = self._read_parts(int(self._first_parts[number]), int(self._first_parts[number + 1]))
        return [(first >> 1, length) for first, length in rows.tolist()]

    def _read_parts(self, first: int, stop: int) -> NDArray[np.integer]:
        return self._packing[_NUM_COUNTS + 2 * first : _NUM_COUNTS + 2 * stop].reshape(-1, 2)


def recipe_best_fit(
    data: DataConfig, stream: TokenFileStream, files: Sequence[TokenFile], *, seq_len: int
) -> BestFitSamples:
    """Open the samples of a recipe's token files packed by best fit, as `open_best_fit` does for any stream."""
    paths = [file.path for file in files]
    if data.document_index:
        paths += [document_ends_path(file.path) for file in files]
    boundaries = DocumentBoundaries(stream, None if data.document_index else data.document_end)
    return open_best_fit(stream, boundaries, paths, seq_len=seq_len, pad_id=max(0, data.document_end))


def open_best_fit(
    stream: TokenStream,
    boundaries: DocumentBoundaries,
    sources: Sequence[Path],
    *,
    seq_len: int,
    pad_id: int,
) -> BestFitSamples:
    """Open the samples of a stream packed by best fit, from the cache or packed now. A changed source is packed again.

    Raises:
        ConfigError: no document has two tokens, no folder for the packing can be written, or the stream is not valid.
    """
    stats = [path.stat() for path in sources]
    files = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in zip(sources, stats, strict=True)]
    window = [WINDOW_TOKENS, WINDOW_SAMPLES, WINDOW_DOCUMENTS]
    identity = ["best fit", FORMAT_VERSION, files, len(stream), *boundaries.identity, seq_len, *window]
    key = entry_key(identity)

    def write(file: BinaryIO) -> None:
        _write_packing(file, len(stream), boundaries, seq_len)

    packing = read_npy_header(cached_ids(key, write)).open()
    samples = BestFitSamples(stream, packing, seq_len, pad_id)
    if not len(samples):
        rule = "found no document of two tokens or more, so there is no target"
        way_out = "check data.document_end, or set data.packing='concatenate'"
        raise ConfigError(Problem("data.packing", "best_fit", rule, way_out))
    return samples


def pack_documents(lengths: Sequence[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Pack documents of the given lengths into samples by best fit decreasing.

    Returns:
        For each sample its parts: document, first token in the document, tokens. Samples are in the order of their
        first part. Documents of one token are in no sample.
    """
    pieces = [
        (document, first, min(seq_len + 1, length - first))
        for document, length in enumerate(lengths)
        for first in range(0, length - 1, seq_len)
    ]
    return [[pieces[i] for i in members] for members in pack_best_fit([piece[2] for piece in pieces], seq_len + 1)]


def document_windows(
    num_tokens: int, boundaries: DocumentBoundaries, window_tokens: int, window_documents: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the documents of a stream in windows: the first token of each document, then the end of the last one.

    A window ends with the document that brings it to `window_tokens`, or has `window_documents`.
    """
    pending = np.empty(0, dtype=np.int64)
    for first in range(0, num_tokens, _CHUNK_TOKENS):
        stop = min(first + _CHUNK_TOKENS, num_tokens)
        pending = np.concatenate((pending, boundaries.starts(first, stop)))
        if stop == num_tokens:
            pending = np.append(pending, num_tokens)
        while len(pending) > 1:
            count = int(np.searchsorted(pending, pending[0] + window_tokens))
            count = min(count, window_documents)
            if count >= len(pending):
                break
            yield pending[: count + 1]
            pending = pending[count:]
    if len(pending) > 1:
        yield pending


def _write_packing(file: BinaryIO, num_tokens: int, boundaries: DocumentBoundaries, seq_len: int) -> None:
    """Write the packing of a stream, see `BestFitSamples`, as an .npy file."""
    counts = PackingCounts()
    dtype = np.dtype("<i8")
    num_parts = 0

    def write_header() -> None:
        file.seek(0)
        file.write(npy_header(dtype, _NUM_COUNTS + 2 * num_parts))
        file.write(np.array(astuple(counts), dtype=dtype).tobytes())

    write_header()
    window_tokens = max(WINDOW_TOKENS, WINDOW_SAMPLES * (seq_len + 1))
    for bounds in document_windows(num_tokens, boundaries, window_tokens, WINDOW_DOCUMENTS):
        lengths = np.diff(bounds)
        counts.num_documents += len(lengths)
        counts.num_split += int((lengths > seq_len + 1).sum())
        counts.num_single += int((lengths == 1).sum())
        samples = pack_documents(lengths.tolist(), seq_len)
        rows = [
            (2 * (int(bounds[document]) + first) + (place == 0), length)
            for pieces in samples
            for place, (document, first, length) in enumerate(pieces)
        ]
        counts.num_samples += len(samples)
        counts.num_tokens += sum(length for _, length in rows)
        num_parts += len(rows)
        file.write(np.array(rows, dtype=dtype).tobytes())
    write_header()
