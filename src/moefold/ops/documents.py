"""Documents packed into the samples of a micro-batch: their bounds, and the tensors of attention that follow."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.host_copy import copy_to_device

if TYPE_CHECKING:
    from moefold.topology.token_placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class DocumentBounds:
    """Start positions of the documents of a micro-batch, known to the host.

    This is not a tuple: FSDP and pipeline schedules copy tuples to the device, and leave an object like this unchanged.
    """

    of_samples: tuple[tuple[int, ...], ...]
    """For each sample the first position of every document, ascending from 0, and then S."""
    placement: "Placement | None" = None
    """Placement of the tokens of the micro-batch set, with the documents of all its samples. None means each sample is
    on its cp ranks, as `sequence_positions` says, and this rank knows the documents of its own samples."""

    @staticmethod
    def of_starts(starts_BS: Tensor) -> "DocumentBounds":
        """Compute the bounds from the start position of each token's document, [B, S].

        The host waits if the tensor is on a GPU.
        """
        return DocumentBounds.of_positions(starts_BS.cpu().numpy())

    @staticmethod
    def of_positions(starts_BS: NDArray[np.int64]) -> "DocumentBounds":
        """Compute `of_starts` for an array of the host."""
        length = starts_BS.shape[1]
        is_first_BS = starts_BS == np.arange(length)
        return DocumentBounds(tuple((*np.flatnonzero(is_first).tolist(), length) for is_first in is_first_BS))


@dataclass(frozen=True)
class Segments:
    """Sequences of variable length, one after the other: the documents of all samples, sample by sample."""

    cu_seqlens: Tensor
    """Cumulative lengths, int32 [sequences + 1], from 0."""
    max_length: int


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of the samples of one micro-batch.

    Tensors and plans are built at their first use and cached: all layers of a stage share them.
    """

    bounds: DocumentBounds
    starts_SB: Tensor
    """Start position of each token's document, int64 [S, B], on the device."""
    token_weights: Tensor | None = None
    """Share of each token of this rank in losses of attention, 0 for padding, [B, S/cp], or None without padding."""
    _cache: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of_starts(starts_SB: Tensor) -> "PackedDocuments":
        """Build the documents from the start of each token's document. The host waits if the tensor is on a GPU."""
        return PackedDocuments(DocumentBounds.of_starts(starts_SB.t()), starts_SB)

    def in_chunks(self, chunk_size: int) -> "PackedDocuments":
        """Divide every document into chunks of `chunk_size` tokens, the last chunk shorter, once."""

        def build() -> PackedDocuments:
            bounds = tuple(
                (*(i for start, stop in pairwise(sample) for i in range(start, stop, chunk_size)), sample[-1])
                for sample in self.bounds.of_samples
            )
            positions_S1 = torch.arange(len(self.starts_SB), device=self.starts_SB.device).unsqueeze(1)
            return PackedDocuments(DocumentBounds(bounds), positions_S1 - (positions_S1 - self.starts_SB) % chunk_size)

        return self.cached(("chunks", chunk_size), build)

    def divide(self, first: int, length: int) -> bool:
        """Return whether a document of any sample begins inside these tokens, after the first of them."""
        return any(bounds[bisect_right(bounds, first)] < first + length for bounds in self.bounds.of_samples)

    def document_at(self, sample: int, position: int) -> range:
        """Return the positions of the document of a token."""
        bounds = self.bounds.of_samples[sample]
        i = bisect_right(bounds, position)
        return range(bounds[i - 1], bounds[i])

    def segments(self, first: int, length: int) -> Segments:
        """Return the parts of the documents inside these tokens, copied to the device without waiting for it."""
        ends = [
            sample * length + min(bound, first + length) - first
            for sample, bounds in enumerate(self.bounds.of_samples)
            for bound in bounds[bisect_right(bounds, first) : bisect_right(bounds, first + length - 1) + 1]
        ]
        limits = [0, *ends]
        return Segments(
            self.cached(
                ("cu_seqlens", first, length),
                lambda: copy_to_device(torch.tensor(limits, dtype=torch.int32), self.starts_SB.device),
            ),
            max(end - start for start, end in pairwise(limits)),
        )

    def cached(self, key: object, build: Callable[[], T]) -> T:
        """Return the value of this key, which is built once."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]


class AttentionChunks:
    """Documents of an attention whose tokens attend within chunks of their document (Llama 4).

    Attention within chunks is attention within shorter documents.

    Args:
        size: tokens of a chunk. 0: no chunks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._cached: PackedDocuments | None = None

    def divide(
        self, documents: PackedDocuments | None, seq_len: int, batch: int, device: torch.device
    ) -> PackedDocuments | None:
        """Return the chunks of the documents as documents, or the documents themselves if there are no chunks.

        Args:
            documents: documents of the whole samples, or None if each sample is one document.
            seq_len: tokens of a whole sample, S.
        """
        if not self.size or (documents is None and seq_len <= self.size):
            return documents
        if documents is None:
            # Kept for the next micro-batch, which has samples of the same length.
            cached = self._cached
            if cached is None or cached.starts_SB.shape != (seq_len, batch) or cached.starts_SB.device != device:
                starts_SB = torch.zeros(seq_len, batch, dtype=torch.int64, device=device)
                self._cached = PackedDocuments(DocumentBounds(((0, seq_len),) * batch), starts_SB)
            documents = self._cached
            assert documents is not None
        return documents.in_chunks(self.size)
