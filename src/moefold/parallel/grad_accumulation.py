"""A step without a pipeline: micro-batches one after another, gradients reduced as the zero level says."""

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
    """This rank's part of a global batch; the micro-batches follow each other along dim 0.

    tokens and labels are int64 [num_micro_batches * B, S/cp], weights [same] the share of each token in the loss,
    samples int64 [num_micro_batches * B] the place of each sample in the global batch. For multi-token prediction,
    mtp_labels and mtp_weights [num_micro_batches * B, mtp_layers, S/cp] are the tokens behind the next and the
    share of each in the loss of its depth. starts, where samples hold several documents, is the position at which the
    document of each token begins, int64 [num_micro_batches * B, S]: of whole samples, on every rank, as attention looks
    beyond the rank's own tokens.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    sample_ids: Tensor
    mtp_labels: Tensor | None = None
    mtp_weights: Tensor | None = None
    document_starts: Tensor | None = None

    def targets(self) -> dict[str, Any]:
        """All but the tokens, by the names that the model knows them by."""
        parts = {name: getattr(self, name) for name in TARGETS}
        return {name: part for name, part in parts.items() if part is not None}

    def tensors(self) -> tuple[Tensor, ...]:
        """All that there is."""
        return (self.tokens, *self.targets().values())


class Accumulation:
    """Runs the whole model on one micro-batch after another."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int) -> None:
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._zero = zero

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of the batch to the parameters; returns the terms of the loss of my tokens, [terms]."""
        total = batch.weights.new_zeros(num_loss_terms(self._model.cfg.model))
        for i, (tokens, targets) in enumerate(self._micro_batches(batch)):
            self._prepare_backward(is_last=i == self._num_micro_batches - 1)
            loss = self._model(tokens, **targets)
            loss.sum().backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The terms of the loss of my tokens, [terms], without gradients."""
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
