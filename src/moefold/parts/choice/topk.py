"""Choice of the best scores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BestScores(ChoicePart):
    """The experts with the best scores."""

    scores_decide: ClassVar[bool] = True

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the best experts."""
        return inputs.best(inputs.ranking_TE)

    def formula(self) -> ChoiceFormula:
        """Return the choice by the biased scores."""
        return ChoiceFormula(lambda scores: scores.biased, has_aux_loss=True)
