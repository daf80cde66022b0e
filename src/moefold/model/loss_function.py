"""Protocol of the loss functions of the last pipeline stage.

A recipe chooses a part of `parts/loss.py`. The loss of a step is the sum of the loss terms over all micro-batches and
ranks (docs/design/001-gradients-are-sums.md). So a term is a sum whose weights add up to 1 over the global batch, as
the column "weights" does.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moefold.model.head import ModelOutput
from moefold.model.loss_metrics import LossMetric


class LossFunction(Protocol):
    """Loss of one micro-batch, computed on the last stage. It has no parameters. Ranks get copies of it."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the terms, for the metrics. Training minimises their sum, which is the metric `loss`."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the terms for this rank's tokens of a micro-batch, the same on every tp rank.

        Args:
            output: hidden states of the last stage, with token losses and logits on demand.
            columns: the columns of the batch, such as "labels" and "weights". See `Batch`.

        Returns:
            The terms, each a weighted sum over tokens, [len(terms)].
        """


def metrics_of(loss: LossFunction) -> Sequence[LossMetric]:
    """Return the `metrics` of a loss function, if it has any.

    A call records them by `ModelOutput.metrics`, on every rank of the last stage. They are logged and not minimised.
    """
    return getattr(loss, "metrics", ())


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum values [B, S/cp] times weights (1 without weights), [1]."""
    # Summed in the head's order of the tokens, sequence-first.
    values = values.t() if weights is None else values.t() * weights.t()
    return values.flatten().sum(0, keepdim=True)
