"""Losses of the last stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moefold.config.base.field import at_least
from moefold.config.groups.loss import LossPart, OracleOutput

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.model.head import ModelOutput


@dataclass(frozen=True, kw_only=True)
class NextTokenLoss(LossPart, kind="next_token"):
    """Cross-entropy of the next token, the weighted mean over the target tokens of the global batch."""

    z_loss: Annotated[float, at_least(0, "0: off")] = 0.0
    """Coefficient of the squared log-sum-exp of the logits of each target token (z-loss of the output head, PaLM,
    arXiv:2204.02311 sec. 5: 1e-4), a term `z` of the loss with the weights of the cross-entropy. It keeps the logits
    near normalised. Evaluation and multi-token prediction do not have this term."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms."""
        return ("cross_entropy", "z") if self.z_loss else ("cross_entropy",)

    def __call__(self, output: "ModelOutput", columns: Mapping[str, "Tensor"]) -> "Tensor":
        """Compute the terms. See the base class."""
        import torch

        from moefold.model.loss_function import weighted_sum

        losses = output.token_losses(columns["labels"])
        cross_entropy = weighted_sum(losses.loss, columns.get("weights"))
        if not self.z_loss:
            return cross_entropy
        coefficient = self.z_loss if output.is_training else 0.0
        squares = weighted_sum(losses.log_normalizer.square(), columns.get("weights"))
        return torch.cat((cross_entropy, coefficient * squares))

    def formula(self) -> Callable[[OracleOutput, Mapping[str, "Tensor"]], "Tensor"]:
        """Return the weighted sum of minus the log-probabilities, and in training of the squared normalizers."""

        def loss(output: OracleOutput, columns: Mapping[str, "Tensor"]) -> "Tensor":
            normalizers = output.logits.logsumexp(-1)
            squares = self.z_loss * normalizers**2 * float(output.is_training)
            return ((squares - output.log_probs()) * columns["weights"]).sum()

        return loss
