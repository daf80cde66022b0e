"""A step without a pipeline: micro-batches one after another, gradients reduced as the zero level says."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.model.transformer import Transformer


@dataclass(frozen=True)
class Batch:
    """This rank's part of a global batch; the micro-batches follow each other along dim 0.

    tokens and labels are int64 [num_micro_batches * B, S/cp], weights [same] the share of each token in the loss,
    samples int64 [num_micro_batches * B] the place of each sample in the global batch. starts, where samples hold
    several documents, is the position at which the document of each token begins, int64 [num_micro_batches * B, S]: of
    whole samples, on every rank, as attention looks beyond the rank's own tokens.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    samples: Tensor
    starts: Tensor | None = None


class Accumulation:
    """Runs the whole model on one micro-batch after another."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int) -> None:
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._zero = zero

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of the batch to the parameters; returns the weighted loss of my tokens, [1]."""
        total = batch.weights.new_zeros(1)
        for i, micro in enumerate(self._micro_batches(batch)):
            self._prepare_backward(is_last=i == self._num_micro_batches - 1)
            loss = self._model(micro.tokens, micro.labels, micro.weights, micro.samples, micro.starts)
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The weighted loss of my tokens, [1], without gradients."""
        total = batch.weights.new_zeros(1)
        for micro in self._micro_batches(batch):
            total += self._model(micro.tokens, micro.labels, micro.weights, starts=micro.starts)
        return total

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        count = self._num_micro_batches
        tensors = (batch.tokens, batch.labels, batch.weights, batch.samples)
        starts = [None] * count if batch.starts is None else batch.starts.chunk(count)
        return [Batch(*part) for part in zip(*(x.chunk(count) for x in tensors), starts, strict=True)]

    def _prepare_backward(self, *, is_last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_is_last_backward(is_last)
            self._model.set_requires_gradient_sync(is_last or self._zero >= 2)
            self._model.set_reshard_after_backward(is_last or self._zero == 3)
