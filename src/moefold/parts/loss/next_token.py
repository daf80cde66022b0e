"""Next-token prediction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.loss import LossPart, OracleOutput

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.model.head import ModelOutput


@dataclass(frozen=True, kw_only=True)
class NextTokenLoss(LossPart):
    """Cross-entropy of the next token, the weighted mean over the target tokens of the global batch."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms."""
        return ("cross_entropy",)

    def __call__(self, output: "ModelOutput", columns: Mapping[str, "Tensor"]) -> "Tensor":
        """Compute the terms; see the base class."""
        from moefold.model.loss_function import weighted_sum

        return weighted_sum(output.cross_entropy(columns["labels"]), columns.get("weights"))

    def formula(self) -> Callable[[OracleOutput, Mapping[str, "Tensor"]], "Tensor"]:
        """Return the weighted sum of minus the log-probabilities."""
        return lambda output, columns: -(output.log_probs() * columns["weights"]).sum()
