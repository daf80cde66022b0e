"""Batch of a rank: tokens, labels and other columns, as every runner of micro-batches reads them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moefold.ops.documents import DocumentBounds

DOCUMENT_BOUNDS = "document_bounds"
"""Name of the argument by which a pipeline stage gets the document bounds of its micro-batch."""


@dataclass(frozen=True)
class Batch:
    """Shard of a global batch that one rank holds: tokens, and columns by name.

    Dim 0 of every tensor is the N = num_micro_batches * B samples of the rank, micro-batch by micro-batch. A *column
    per token* is sharded over cp, [N, ..., S/cp]. A *column per sample* [N, ...] is whole on every cp rank.
    `BatchSharder` makes them:

    * "labels": the next tokens, int64 [N, S/cp].
    * "weights": share of each token in the loss, [N, S/cp]. It is 1/(target tokens of the global batch), or 0.
    * "sample_ids": index of each sample in the global batch, int64 [N].
    * "mtp_labels": the tokens after the next token, for multi-token prediction, int64 [N, mtp_layers, S/cp].
    * "mtp_weights": share of each of them in the loss of its depth, [N, mtp_layers, S/cp]. It is 0 after the sample.
    * "document_starts": start of each token's document, int64 [N, S], if samples hold several documents. It is per
      sample because attention crosses shards. `document_bounds` has the same starts on the host, which cannot read a
      tensor of a GPU without waiting.
    * "token_weights": share of each token in the auxiliary losses of the routers, [N, S/cp], if the global batch has
      padding. It is 1/(tokens of the global batch), or 0 for padding, which is not routed.

    If `parallel.context` moves tokens, a row holds tokens of several samples. Then "document_starts" is per token,
    "sample_ids" are the samples of rows that did not move, and two columns identify the tokens:

    * "token_samples": index of each token's sample in the global batch, int64 [N, S/cp].
    * "positions": position of each token in its sample, int64 [N, S/cp].
    """

    tokens: Tensor
    """int64 [N, S/cp]."""
    columns: dict[str, Tensor]
    document_bounds: tuple[DocumentBounds, ...] = ()
    """Document starts of each micro-batch, known to the host, only if samples hold several documents."""
    num_tokens: int | None = None
    """Input tokens of the global batch over all ranks, without padding, or None for a batch that no trainer counts."""
    num_micro_batches: int | None = None
    """Number of micro-batches of this batch. None means the recipe's number. Pipelines always run the recipe's number.
    """
    mismatch_limit: float | None = None
    """Limit on the mismatch of sampler and training in this batch, or None if it is not judged."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tokens and every column."""
        return (self.tokens, *self.columns.values())

    def placed_samples(self) -> tuple[int, ...] | None:
        """Return the samples that have tokens on this rank, as ascending indices in the global batch.

        None if this rank has whole samples or shards of them. The host waits for the device.
        """
        if "token_samples" not in self.columns:
            return None
        return tuple(self.columns["token_samples"].unique().tolist())

    def micro_batches(self, count: int) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Split the batch into micro-batches, and yield the arguments of the model for each: tokens and keywords.

        Raises:
            ValueError: the samples cannot be split into `count` micro-batches of equal size.
        """
        if not len(self.tokens) or len(self.tokens) % count:
            raise ValueError(f"a batch of {len(self.tokens)} samples cannot be split into {count} equal micro-batches")
        chunks = {name: column.chunk(count) for name, column in self.columns.items()}
        for i, tokens in enumerate(self.tokens.chunk(count)):
            bounds = {DOCUMENT_BOUNDS: self.document_bounds[i]} if self.document_bounds else {}
            yield tokens, {name: chunk[i] for name, chunk in chunks.items()} | bounds
