"""Gradient accumulation over the micro-batches of a rank without a pipeline, one after another or overlapped."""

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moefold.comm.groups import ParallelGroups
from moefold.comm.private_torch import run_fsdp_post_backward
from moefold.comm.resumable import ResumableTask, run_to_end
from moefold.model.transformer import Transformer
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import UnshardedParams


class Accumulation:
    """Runs the whole model on one micro-batch after another."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int) -> None:
        self._model = model
        self._num_micro_batches = num_micro_batches
        self._zero = zero

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the batch, and return the loss terms of this rank's tokens, [terms]."""
        total = self._zero_terms(batch)
        count = self._count(batch)
        for i, (tokens, keywords) in enumerate(batch.micro_batches(count)):
            self._prepare_backward(is_last=i == count - 1)
            loss = self._model(tokens, **keywords)
            loss.sum().backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss terms of this rank's tokens, [terms], without gradients."""
        total = self._zero_terms(batch)
        for tokens, keywords in batch.micro_batches(self._count(batch)):
            total += self._model(tokens, **keywords)
        return total

    def _count(self, batch: Batch) -> int:
        """Return the number of micro-batches of a batch on this rank."""
        return batch.num_micro_batches or self._num_micro_batches

    def _zero_terms(self, batch: Batch) -> Tensor:
        return batch.columns["weights"].new_zeros(len(self._model.loss_terms))

    def _prepare_backward(self, *, is_last: bool) -> None:
        if isinstance(self._model, FSDPModule):
            self._model.set_is_last_backward(is_last)
            self._model.set_requires_gradient_sync(is_last or self._zero >= 2)
            self._model.set_reshard_after_backward(is_last or self._zero == 3)


class OverlappedAccumulation(Accumulation):
    """Gradient accumulation on two micro-batches at a time: the forward pass of one, the backward pass of the other."""

    def __init__(self, model: Transformer, num_micro_batches: int, zero: int, groups: ParallelGroups) -> None:
        super().__init__(model, num_micro_batches, zero)
        self._unsharded_params = UnshardedParams([model], zero)
        self._backward_overlap = groups.backward_overlap
        self._recorder = groups.recorder

    def forward_backward(self, batch: Batch) -> Tensor:
        """See base class."""
        total = self._zero_terms(batch)
        loss: Tensor | None = None
        with self._unsharded_params.step():
            for i, (tokens, keywords) in enumerate(batch.micro_batches(self._count(batch))):
                task = ResumableTask(self._model.forward_resumable(tokens, **keywords))
                if loss is None:
                    self._recorder.set_phase("forward of micro-batch 0")
                else:
                    self._recorder.set_phase(f"backward of micro-batch {i - 1} overlapped with the forward of {i}")
                    with self._backward_overlap.backward(task):
                        loss.sum().backward()
                    run_fsdp_post_backward(self._model)
                loss = task.run_to_end()
                total += loss.detach()
            assert loss is not None
            self._recorder.set_phase("backward of the last micro-batch")
            loss.sum().backward()
            run_fsdp_post_backward(self._model)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See base class."""
        total = self._zero_terms(batch)
        with self._unsharded_params.unsharded():
            for tokens, keywords in batch.micro_batches(self._count(batch)):
                # The model is not called here: the hooks of FSDP would shard the parameters.
                total += run_to_end(self._model.forward_resumable(tokens, **keywords))
        return total
