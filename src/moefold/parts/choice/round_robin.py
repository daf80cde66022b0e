"""Forced choice: every expert gets the same number of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart
from moefold.config.routing import assign_in_turn, no_bias_problems
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RoundRobin(ChoicePart):
    """The experts one after another: a perfectly even load, for benchmarks."""

    is_forced: ClassVar[bool] = True

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the next experts of each token."""
        return assign_in_turn(inputs.tokens.global_index(), inputs.top_k, inputs.logits_TE.shape[1])

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for settings of scores, which this choice does not read."""
        return no_bias_problems(model, self.kind, "reads no score")

    def formula(self) -> ChoiceFormula:
        """Return the experts of a token by counting."""

        def forced(token: int, top_k: int, num_experts: int) -> list[int]:
            return [(token * top_k + k) % num_experts for k in range(top_k)]

        return ChoiceFormula(lambda scores: scores.biased, forced=forced)
