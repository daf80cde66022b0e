"""Losses of the last pipeline stage that a recipe chooses.

Losses of preferences and policies are in `objectives/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.base.part import Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OracleOutput:
    """Predictions of a micro-batch in float64, for the oracle."""

    logits: "Tensor"
    """[B, S, V]."""
    targets: "Tensor"
    """Next tokens, int64 [B, S]."""
    is_training: bool = True
    """False in evaluation."""

    def log_probs(self, temperature: float = 1.0) -> "Tensor":
        """Return the log-probabilities of the targets under a temperature, [B, S]."""
        log_probs = (self.logits / temperature).log_softmax(-1)
        return log_probs.gather(-1, self.targets[..., None]).squeeze(-1)


OracleLoss = Callable[[OracleOutput, Mapping[str, "Tensor"]], "Tensor"]
"""Loss of a micro-batch, a 0-dim tensor, from predictions and columns, [B, ...] each. "weights" sum to 1 over the
global batch."""


@dataclass(frozen=True, kw_only=True)
class LossPart(Part):
    """Stateless loss of the last stage, which is a `LossFunction` (`model/loss_function.py`).

    Terms that are only for training, such as a penalty, are 0 if `output.is_training` is False, so that evaluations of
    different recipes can be compared. A loss may declare `metrics`, and `columns` of the batch other than "labels" and
    "weights".
    """

    group: ClassVar[str] = "loss"
    key: ClassVar[str] = "train.loss"
    is_for_training: ClassVar[bool] = True

    @property
    def terms(self) -> Sequence[str]:
        """Names of the terms, for the metrics. Training minimises their sum, which is the metric `loss`."""
        raise NotImplementedError

    def __call__(self, output: Any, columns: Mapping[str, "Tensor"]) -> "Tensor":
        """Compute the terms for this rank's tokens of a micro-batch, [len(terms)], as a `LossFunction` does.

        Args:
            output: `model.head.ModelOutput`: cross-entropy, log-normalizer and logits on demand.
        """
        raise NotImplementedError

    def formula(self) -> OracleLoss | None:
        """Return the sum of the terms for the oracle, or None if it has no formula."""
        return None
