"""Gradient accumulation without pipeline parallelism: micro-batches in sequence, gradients reduced per ZeRO level."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.model.transformer import Transformer, num_loss_terms

TARGETS = ("labels", "weights", "sample_ids", "mtp_labels", "mtp_weights", "document_starts")


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a global batch; micro-batches are contiguous along dim 0.

    tokens and labels are int64 [num_micro_batches * B, S/cp], weights [same] the weight of each token in the loss,
    sample_ids int64 [num_micro_batches * B] the index of each sample in the global batch. For MTP, mtp_labels and
    mtp_weights [num_micro_batches * B, mtp_layers, S/cp] are the tokens after the next one and the weight of each in
    the loss of its depth. document_starts, if samples hold several documents, is the position at which the document of
    each token begins, int64 [num_micro_batches * B, S]: of full samples on every rank, as attention crosses shards.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    sample_ids: Tensor
    mtp_labels: Tensor | None = None
    mtp_weights: Tensor | None = None
    document_starts: Tensor | None = None

    def targets(self) -> dict[str, Any]:
        """Return all tensors but the tokens, by the names of the model's forward arguments."""
        parts = {name: getattr(self, name) for name in TARGETS}
        return {name: part for name, part in parts.items() if part is not None}

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (self.tokens, *self.targets().values())


class Accumulation:
    """Runs the whole model on one micro-batch after another."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int) -> None:
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._zero = zero

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch; return the loss terms of this rank's tokens, [terms]."""
        total = batch.weights.new_zeros(num_loss_terms(self._model.cfg.model))
        for i, (tokens, targets) in enumerate(self._micro_batches(batch)):
            self._prepare_backward(is_last=i == self._num_micro_batches - 1)
            loss = self._model(tokens, **targets)
            loss.sum().backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss terms of this rank's tokens, [terms], without gradients."""
        total = batch.weights.new_zeros(num_loss_terms(self._model.cfg.model))
        for tokens, targets in self._micro_batches(batch):
            total += self._model(tokens, **targets)
        return total

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        targets = {name: part.chunk(self._num_micro_batches) for name, part in batch.targets().items()}
        for i, tokens in enumerate(batch.tokens.chunk(self._num_micro_batches)):
            yield tokens, {name: parts[i] for name, parts in targets.items()}

    def _prepare_backward(self, *, is_last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_is_last_backward(is_last)
            self._model.set_requires_gradient_sync(is_last or self._zero >= 2)
            self._model.set_reshard_after_backward(is_last or self._zero == 3)
