"""Choice balanced by Sinkhorn iterations over a micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import MaxMagnitude, at_least
from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart
from moefold.config.routing import no_bias_problems
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Sinkhorn(ChoicePart):
    """The best logits after offsets that balance the experts, in training; the best logits in evaluation."""

    reads_micro_batch: ClassVar[bool] = True
    iterations: Annotated[int, at_least(1), MaxMagnitude(10_000)] = 20
    """Iterations (row and column scaling) on the logits of a micro-batch."""

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the best experts by logits and offsets; all-gathers the logits of the micro-batch in training."""
        from moefold.parts.choice.sinkhorn.module import sinkhorn_offsets

        if not inputs.is_training:
            return inputs.largest(inputs.logits_TE)
        tokens = inputs.tokens
        offsets_E = sinkhorn_offsets(inputs.logits_TE, self.iterations, tokens.group, tokens.is_token())
        return inputs.largest(inputs.logits_TE + offsets_E)

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for settings that would also balance the experts."""
        return no_bias_problems(model, self.kind, "balances the experts by itself")

    def formula(self) -> ChoiceFormula:
        """Return the choice by a matrix whose rows and columns are scaled."""
        from moefold.parts.choice.sinkhorn.oracle import ranking

        return ChoiceFormula(partial(ranking, self.iterations))
