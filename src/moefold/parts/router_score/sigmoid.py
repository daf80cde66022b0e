"""Sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437 sec. 2.1.2)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.router import ScoreFormula, SeparateScorePart, Softmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SigmoidScore(SeparateScorePart):
    """Sigmoid of each logit separately."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the sigmoids."""
        from moefold.ops.elementwise import sigmoid

        return sigmoid(logits_TE)

    def uniform_weight(self, num_experts: int) -> float:
        """Return the sigmoid of 0."""
        return 0.5

    def fused_options(self) -> dict[str, bool]:
        """Return the options of the kernel."""
        return {"is_softmax": False, "is_post_softmax": False, "normalizes_probs": self.normalize}

    def formula(self) -> ScoreFormula:
        """Return 1 / (1 + exp(-x))."""

        def weights(chosen_scores: "Tensor") -> "Tensor":
            return chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20) if self.normalize else chosen_scores

        return ScoreFormula(lambda logits: 1 / (1 + math.e**-logits), weights, num_summed=2)
