"""Importance weights of tokens whose sampler computes other log-probabilities than training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.part import Part

if TYPE_CHECKING:
    from torch import Tensor

CorrectionFormula = Callable[["Tensor", Callable[["Tensor"], "Tensor"], int], float]
"""Factor of one token from the differences of its row, trainer less sampler, [S]; a function from a row to the values
of its rollout; and its position."""


@dataclass(frozen=True, kw_only=True)
class CorrectionPart(Part):
    """Factor of a token's loss: c = exp(log-probability in training - in sampling), limited in some way."""

    group: ClassVar[str] = "correction"
    key: ClassVar[str] = "rl.correction"
    corrects: ClassVar[bool] = True
    """Whether there is a factor at all."""
    reads_rollouts: ClassVar[bool] = False
    """Whether it reads which tokens form a rollout."""

    def limited(self, factor: "Tensor", difference: "Tensor", mean: Callable[["Tensor"], "Tensor"]) -> "Tensor":
        """Return the factor of each token, [B, S/cp], without gradient.

        Args:
            factor: exp(difference).
            difference: log-probabilities of the trainer less those that the sampler computed, [B, S/cp].
            mean: mean over the tokens of each token's rollout, [B, S/cp] -> same.
        """
        raise NotImplementedError

    def formula(self) -> CorrectionFormula | None:
        """Return the factor of one token; None: it has no formula."""
        return None
