"""Forced choice: a share of the tokens goes to expert 0."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.field import SHARE
from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart
from moefold.config.routing import assign_in_turn, no_bias_problems
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Skewed(ChoicePart):
    """Expert 0 for an evenly spread share of the tokens, and the other experts one after another, for benchmarks."""

    is_forced: ClassVar[bool] = True
    share: Annotated[float, SHARE] = 0.8
    """Fraction of the tokens that have expert 0 among their experts."""

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return expert 0 or the next expert first, and then the following experts."""
        return self.assign(inputs.tokens.global_index(), inputs.top_k, inputs.logits_TE.shape[1])

    def assign(self, index_T: "Tensor", top_k: int, num_experts: int) -> "Tensor":
        """Assign experts to the tokens of a micro-batch by their indices, int64 [T, K]."""
        ids_TK = assign_in_turn(index_T, top_k, num_experts, first=1)
        index_T = index_T.double()
        ids_TK[:, 0].masked_fill_(((index_T + 1) * self.share).floor() > (index_T * self.share).floor(), 0)
        return ids_TK

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for settings of scores, which this choice does not read, and for too few experts."""
        yield from no_bias_problems(model, self.kind, "reads no score")
        part = model.routed
        if part is None or part.top_k < part.num_experts:
            return
        if part.num_experts == 1:
            rule = "needs more experts than expert 0, and model.ffn.moe.num_experts=1"
            yield Problem(self.key, self.kind, rule, "choose 2 or more")
            return
        yield Problem(
            self.key,
            self.kind,
            f"assigns all other experts to the remaining tokens, so model.ffn.moe.top_k={part.top_k} must be below "
            f"model.ffn.moe.num_experts={part.num_experts}",
            f"choose top_k of at most {part.num_experts - 1}",
        )

    def formula(self) -> ChoiceFormula:
        """Return the experts of a token by counting."""

        def forced(token: int, top_k: int, num_experts: int) -> list[int]:
            experts = [1 + (token * top_k + k) % (num_experts - 1) for k in range(top_k)]
            is_skewed = math.floor((token + 1) * self.share) > math.floor(token * self.share)
            return [0, *experts[1:]] if is_skewed else experts

        return ChoiceFormula(lambda scores: scores.biased, forced=forced)
