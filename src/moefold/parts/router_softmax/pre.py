"""Softmax before the choice: the weights are the scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router import RouterSoftmaxPart, ScoreFormula, Softmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SoftmaxBeforeChoice(RouterSoftmaxPart):
    """The softmax over all experts, before the top-k. Each chosen expert has its value."""

    is_post: ClassVar[bool | None] = False

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the scores of the chosen experts."""
        return scores_TE.gather(1, ids_TK)

    def formula(self) -> Callable[[Callable[["Tensor"], "Tensor"]], ScoreFormula]:
        """Return the chosen scores unchanged."""
        return lambda softmax: ScoreFormula(softmax, lambda scores: scores, num_summed=1)
