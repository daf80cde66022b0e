"""Log-probabilities of the labels of a batch, by a forward pass of training without gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.model.head import ModelOutput
from moefold.model.loss import SoftmaxOptions
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel


class LogProbCapture:
    """Loss function that stores the log-probabilities of the labels, and whose terms are 0.

    They are computed as `PolicyGradientLoss` computes them, so equal weights have equal log-probabilities.

    Args:
        terms: names of the loss terms. A pipeline has room for the terms of the loss that it was built with.
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


def label_log_probs(model: ParallelModel, capture: LogProbCapture, batch: Batch, weights_name: str) -> Tensor:
    """Return the log-probability of each label of this rank's shard, [N, S/cp]. It is collective.

    Pipeline ranks other than the last return zeros.

    Args:
        capture: the loss of its last stage in this pass.
        weights_name: name of the weights, for the phase of the step and for errors.
    """
    passes = f"log-probabilities of {weights_name}"
    model.groups.recorder.set_phase(passes)
    capture.captured.clear()
    with model.evaluating(f"the pass for the {passes}", capture):
        model.runner.evaluate(batch)
    weights = batch.columns["weights"]
    if not capture.captured:
        return torch.zeros_like(weights)
    sample_ids, log_probs = map(torch.cat, zip(*capture.captured, strict=True))
    capture.captured.clear()
    # A pipeline schedule may run the micro-batches in any order.
    return log_probs[sample_ids.argsort()].to(weights.dtype)
