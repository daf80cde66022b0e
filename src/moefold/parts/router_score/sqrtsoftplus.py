"""Square root of the softplus of each logit."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moefold.config.groups.router_score import SCORE_SUM_EPS, RouterScorePart, ScoreFormula, Softmax
from moefold.config.part import FlatKey

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SqrtSoftplusScore(RouterScorePart):
    """Square root of the softplus of each logit by itself."""

    normalize: Annotated[bool, FlatKey("model.router_normalize")]

    def scores(self, logits_TE: "Tensor", softmax: Softmax) -> "Tensor":
        """Return the roots; they have no gradient at 0, to which softplus of a very negative logit underflows."""
        import torch

        from moefold.ops.elementwise import softplus

        return softplus(logits_TE).clamp(min=torch.finfo(logits_TE.dtype).tiny).sqrt()

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the scores of the chosen experts, divided by their sum if `normalize`."""
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / (weights_TK.sum(-1, keepdim=True) + SCORE_SUM_EPS) if self.normalize else weights_TK

    @property
    def weights_sum_to_one(self) -> bool:
        """Return whether the weights are divided by their sum."""
        return self.normalize

    def uniform_weight(self, num_experts: int) -> float:
        """Return the root of the softplus of 0."""
        return math.sqrt(math.log(2))

    def formula(self) -> ScoreFormula:
        """Return sqrt(log(1 + exp(x)))."""

        def weights(chosen: "Tensor") -> "Tensor":
            return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if self.normalize else chosen

        return ScoreFormula(lambda logits: logits.exp().log1p().sqrt(), weights, num_summed=2)
