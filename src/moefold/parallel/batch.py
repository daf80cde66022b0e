"""Batch of a rank: tokens, and columns by name, split into micro-batches for every runner."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moefold.ops.documents import DocumentBounds

DOCUMENT_BOUNDS = "document_bounds"
"""Keyword argument of a stage."""


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a global batch: tokens, and columns by name.

    Micro-batches are contiguous along dim 0 of every tensor. A column per token has the shape of its S tokens sharded
    over cp, [N, ..., S/cp] for N = num_micro_batches * B samples. A column per sample [N, ...] is whole on every cp
    rank. `BatchSharder` makes these columns, and the columns of the samples:

    * "labels": next tokens, int64 [N, S/cp].
    * "weights": share of each token in the loss, [N, S/cp]: 1/(target tokens of the global batch), 0 where masked.
    * "sample_ids": index of each sample in the global batch, int64 [N].
    * "mtp_labels", with multi-token prediction (MTP): the tokens after the next token, int64 [N, mtp_layers, S/cp].
    * "mtp_weights": share of each MTP target in the loss of its depth, [N, mtp_layers, S/cp], 0 after the sample's end.
    * "document_starts", if samples hold several documents: start position of each token's document, int64 [N, S]. It is
      a column per sample, as attention crosses shards. Attention stays within a document. The starts are also in
      `document_bounds`, as the host cannot read a column on a GPU without waiting.
    * "token_weights", if the global batch has padding: share of each token in the auxiliary losses of the routers, [N,
      S/cp]: 1/(tokens of the global batch), 0 for padding, which is not routed.

    Where `parallel.context` moves tokens, the rows of a micro-batch hold the tokens of this rank's slots and are not
    samples. "document_starts" is a column per token then, and two more columns say which tokens they are:

    * "token_samples": index of each token's sample in the global batch, int64 [N, S/cp]. "sample_ids" are the samples
      of unmoved rows.
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
    """Number of micro-batches of this batch. None: the recipe's number. Pipelines always run the recipe's number."""
    mismatch_limit: float | None = None
    """Limit on the mismatch of sampler and training in this batch, or None if it is not judged."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
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
