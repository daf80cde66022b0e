"""Log-probabilities of the labels of a batch, by a forward pass of training without gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.model.head import ModelOutput
from moefold.model.loss import SoftmaxOptions
from moefold.parallel.batch import Batch
from moefold.parallel.fsdp import reshard_parameters
from moefold.parallel.parallel_model import ParallelModel


class LogProbCapture:
    """Loss function that stores the log-probabilities of the labels, and whose terms are 0.

    They are computed as `PolicyGradientLoss` computes them, so equal weights have equal log-probabilities.

    Args:
        temperature: divides the logits.
        terms: names of the loss terms; a pipeline has room for the terms of the loss that it was built with.
    """

    def __init__(self, temperature: float, terms: tuple[str, ...] = ("log_probs",)) -> None:
        self.terms = terms
        self._options = SoftmaxOptions(temperature, has_entropy=True)
        self.captured: list[tuple[Tensor, Tensor]] = []
        """Sample ids, [B], and log-probabilities, [B, S/cp], of each micro-batch, in the order of the passes."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Store the log-probabilities and return zeros, [terms]."""
        losses = output.token_losses(columns["labels"], self._options).loss
        self.captured.append((columns["sample_ids"], -losses.detach()))
        return losses.new_zeros(len(self.terms))


def label_log_probs(model: ParallelModel, capture: LogProbCapture, batch: Batch) -> Tensor:
    """Return the log-probability of each label of this rank's shard, [N, S/cp]; collective over the ranks of the model.

    Pipeline ranks other than the last return zeros.

    Args:
        model: the model in evaluation mode, with `capture` as the loss of its last stage.
        capture: the loss of the last stage.
        batch: this rank's shard of a batch.
    """
    capture.captured.clear()
    with model.cast_copies.fresh():
        model.runner.evaluate(batch)
    # The next pass gathers the weights again, after they have changed.
    reshard_parameters(model.stages)
    weights = batch.columns["weights"]
    if not capture.captured:
        return torch.zeros_like(weights)
    sample_ids, log_probs = map(torch.cat, zip(*capture.captured, strict=True))
    capture.captured.clear()
    # A pipeline schedule may run the micro-batches in any order.
    return log_probs[sample_ids.argsort()].to(weights.dtype)


class TrainerLogProbs:
    """Computes the log-probabilities of batches under the current weights of a model in training.

    Args:
        model: the model in training.
        temperature: divides the logits, as in the loss.
    """

    def __init__(self, model: ParallelModel, temperature: float) -> None:
        self._model = model
        self._capture = LogProbCapture(temperature, tuple(model.stages[-1].loss.terms))

    def of_batch(self, batch: Batch) -> Tensor:
        """Return the log-probability of each label, [N, S/cp], as `label_log_probs`; collective."""
        model = self._model
        model.groups.recorder.set_phase("log-probabilities of the weights that sampled")
        last = model.stages[-1]
        loss = last.loss
        last.loss = self._capture
        model.train(False)
        try:
            return label_log_probs(model, self._capture, batch)
        finally:
            model.train(True)
            last.loss = loss
