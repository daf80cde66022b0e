"""Softmax after the choice: the weights of a token sum to 1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router import RouterSoftmaxPart, ScoreFormula, Softmax

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SoftmaxAfterChoice(RouterSoftmaxPart):
    """The softmax of the chosen logits, after the top-k: the weights of a token sum to 1."""

    sum_to_one: ClassVar[bool] = True
    is_post: ClassVar[bool | None] = True

    def weights(
        self, logits_TE: "Tensor", scores_TE: "Tensor", ids_TK: "Tensor", noise_TN: "Tensor | None", softmax: Softmax
    ) -> "Tensor":
        """Return the softmax of the chosen logits."""
        return softmax(logits_TE.gather(1, ids_TK))

    def formula(self) -> Callable[[Callable[["Tensor"], "Tensor"]], ScoreFormula]:
        """Return the chosen scores divided by their sum."""
        return lambda softmax: ScoreFormula(softmax, lambda scores: scores / scores.sum(-1, keepdim=True), num_summed=1)
