"""Loss functions of the last pipeline stage: their protocol, and the metrics that they report.

A recipe chooses a part of `parts/loss.py`. The loss of a step is the sum of the loss terms over all micro-batches and
ranks (docs/design/001-gradients-are-sums.md), so a term is a sum whose weights add up to 1 over the global batch, as
the column "weights" does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moefold.model.head import ModelOutput

MISMATCH = "mismatch_mean"
"""Metric of sampled tokens whose limit is rl.mismatch_limit."""


class LossFunction(Protocol):
    """Loss of one micro-batch, computed on the last stage. It has no parameters; ranks get copies of it."""

    @property
    def terms(self) -> Sequence[str]:
        """Names of the terms, for the metrics. Training minimises their sum, which is the metric `loss`."""

    def __call__(self, output: "ModelOutput", columns: Mapping[str, Tensor]) -> Tensor:
        """Compute the terms for this rank's tokens of a micro-batch; the same on every tp rank.

        Args:
            output: hidden states of the last stage; token losses and logits on demand.
            columns: the columns of the batch, such as "labels" and "weights"; see `Batch`.

        Returns:
            The terms, each a weighted sum over tokens, [len(terms)].
        """


def metrics_of(loss: LossFunction) -> Sequence["LossMetric"]:
    """Return the `metrics` of a loss function, if it has any.

    A call records them by `ModelOutput.metrics`, on every rank of the last stage; they are logged and not minimised.
    """
    return getattr(loss, "metrics", ())


def weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """Sum values [B, S/cp] times weights (1 without weights), [1]."""
    # Summed in the head's order of the tokens, sequence-first.
    values = values.t() if weights is None else values.t() * weights.t()
    return values.flatten().sum(0, keepdim=True)


@dataclass(frozen=True)
class LossMetric:
    """A declared metric: the ranks of other stages and the log know it before a value is recorded."""

    name: str
    reduction: Literal["mean", "max"]
    """Over the tokens of all micro-batches and ranks."""


class LossMetricRecorder:
    """Values that the loss of this rank's last stage records during a step. Local, on the device, without gradients.

    The metrics of a step are summed over the ranks together with the loss terms, see `TrainingStep`.
    """

    def __init__(self, metrics: Sequence[LossMetric] = ()) -> None:
        self.metrics = tuple(metrics)
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget the recorded values, at the start of a step."""
        self._sums.clear()
        self._maxima.clear()

    @torch.no_grad()
    def record_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values to a declared mean.

        Args:
            name: name of a metric with reduction "mean".
            values: one value for each token or sequence of this rank.
            mask: bool, in the shape of the values; False values do not count.
        """
        assert LossMetric(name, "mean") in self.metrics, name
        sum_and_count = torch.stack((values.double().where(mask, 0.0).sum(), mask.sum().double()))
        self._sums[name] = self._sums[name] + sum_and_count if name in self._sums else sum_and_count

    @torch.no_grad()
    def record_max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values to a declared maximum; the arguments are the same as for `record_mean`."""
        assert LossMetric(name, "max") in self.metrics, name
        top = values.double().where(mask, -torch.inf).amax()
        self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top

    def sums(self, device: torch.device) -> Tensor:
        """Return sum and count of each mean, float64 [means, 2]; zeros for a mean that was not recorded."""
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        rows = [self._sums.get(name, nothing) for name in self._names("mean")]
        return torch.stack(rows) if rows else nothing.new_zeros(0, 2)

    def maxima(self, device: torch.device) -> Tensor:
        """Return each maximum, float64 [maxima]; -inf for a maximum that was not recorded."""
        lowest = torch.full((), -torch.inf, dtype=torch.float64, device=device)
        values = [self._maxima.get(name, lowest) for name in self._names("max")]
        return torch.stack(values) if values else lowest.new_zeros(0)

    def by_name(self, sums: Tensor, maxima: Tensor) -> dict[str, float]:
        """Return the metrics by name from sums and maxima over all ranks, without metrics that no rank recorded."""
        pairs = zip(self._names("mean"), sums.tolist(), strict=True)
        means = {name: total / count for name, (total, count) in pairs if count}
        tops = zip(self._names("max"), maxima.tolist(), strict=True)
        values = means | {name: top for name, top in tops if top != -float("inf")}
        return {metric.name: values[metric.name] for metric in self.metrics if metric.name in values}

    def _names(self, reduction: str) -> list[str]:
        return [metric.name for metric in self.metrics if metric.reduction == reduction]
