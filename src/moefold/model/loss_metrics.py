"""Metrics of a loss function: means and maxima over the tokens of a step, which are logged and not minimised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MISMATCH = "mismatch_mean"
"""Metric of sampled tokens whose limit is rl.mismatch_limit."""


@dataclass(frozen=True)
class LossMetric:
    """A declared metric: the ranks of other stages and the log know it before a value is recorded."""

    name: str
    reduction: Literal["mean", "max"]
    """Over the tokens of all micro-batches and ranks."""


class LossMetricRecorder:
    """Values that the loss of this rank's last stage records in a step, on the device, without gradients.

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
            mask: bool, in the shape of the values. False values do not count.
        """
        assert LossMetric(name, "mean") in self.metrics, name
        sum_and_count = torch.stack((values.double().where(mask, 0.0).sum(), mask.sum().double()))
        self._sums[name] = self._sums[name] + sum_and_count if name in self._sums else sum_and_count

    @torch.no_grad()
    def record_max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add values to a declared maximum. The arguments are the same as for `record_mean`."""
        assert LossMetric(name, "max") in self.metrics, name
        top = values.double().where(mask, -torch.inf).amax()
        self._maxima[name] = torch.maximum(self._maxima[name], top) if name in self._maxima else top

    def sums(self, device: torch.device) -> Tensor:
        """Return sum and count of each mean, float64 [means, 2], or zeros for a mean that was not recorded."""
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        rows = [self._sums.get(name, nothing) for name in self._names("mean")]
        return torch.stack(rows) if rows else nothing.new_zeros(0, 2)

    def maxima(self, device: torch.device) -> Tensor:
        """Return each maximum, float64 [maxima], or -inf for a maximum that was not recorded."""
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
