"""Overlapped micro-batches without a pipeline: a forward pass runs during the backward pass of another micro-batch."""

import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups
from moefold.comm.resumable import ResumableTask, run_to_end
from moefold.model.transformer import Transformer
from moefold.parallel.accumulation import Accumulation
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import UnshardedParams


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
                    self._unsharded_params.finish_backward(self._model)
                loss = task.run_to_end()
                total += loss.detach()
            assert loss is not None
            self._recorder.set_phase("backward of the last micro-batch")
            loss.sum().backward()
            self._unsharded_params.finish_backward(self._model)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """See base class."""
        self._recorder.set_phase("evaluation")
        total = self._zero_terms(batch)
        with self._unsharded_params.unsharded():
            for tokens, keywords in batch.micro_batches(self._count(batch)):
                # The model is not called here: the hooks of FSDP would shard the parameters.
                total += run_to_end(self._model.forward_resumable(tokens, **keywords))
        return total
