"""Batch of a rank: tokens, and columns by name, split into micro-batches for every runner."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a global batch: tokens, and columns by name.

    Micro-batches are contiguous along dim 0 of every tensor. A column per token has the shape of its S tokens sharded
    over cp, [N, ..., S/cp] for N = num_micro_batches * B samples; a column per sample [N, ...] is whole on every cp
    rank. `BatchSharder` makes these columns, and those that the samples bring along:

    * "labels": next tokens, int64 [N, S/cp].
    * "weights": share of each token in the loss, [N, S/cp]: 1/(target tokens of the global batch), 0 where masked.
    * "sample_ids": index of each sample in the global batch, int64 [N].
    * "mtp_labels", with multi-token prediction (MTP): the tokens after the next one, int64 [N, mtp_layers, S/cp].
    * "mtp_weights": share of each MTP target in the loss of its depth, [N, mtp_layers, S/cp]; 0 after the sample's end.
    * "document_starts", if samples hold several documents: position at which the document of each token begins, int64
      [N, S]. It is a column per sample, as attention crosses shards. Attention stays within a document.
    """

    tokens: Tensor
    """int64 [N, S/cp]."""
    columns: dict[str, Tensor]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (self.tokens, *self.columns.values())

    def micro_batches(self, count: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Split the batch into micro-batches; return tokens and columns of each."""
        parts = {name: column.chunk(count) for name, column in self.columns.items()}
        for i, tokens in enumerate(self.tokens.chunk(count)):
            yield tokens, {name: part[i] for name, part in parts.items()}
