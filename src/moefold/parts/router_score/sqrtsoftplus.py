"""Square root of the softplus of each logit."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moefold.config.groups.router import ScoreFormula, SeparateScorePart, Softmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SqrtSoftplusScore(SeparateScorePart):
    """Square root of the softplus of each logit separately."""

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the roots of softplus, without a gradient at 0, where softplus of a very negative logit underflows."""
        import torch

        from moefold.ops.elementwise import softplus

        return softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()

    def uniform_weight(self, num_experts: int) -> float:
        """Return the root of the softplus of 0."""
        return math.sqrt(math.log(2))

    def formula(self) -> ScoreFormula:
        """Return sqrt(log(1 + exp(x)))."""

        def weights(chosen_scores: "Tensor") -> "Tensor":
            return chosen_scores / (chosen_scores.sum(-1, keepdim=True) + 1e-20) if self.normalize else chosen_scores

        return ScoreFormula(lambda logits: logits.exp().log1p().sqrt(), weights, num_summed=2)
