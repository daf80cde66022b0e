"""Choice balanced by quantiles of the scores of a micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart, Tokens
from moefold.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Quantile(ChoicePart):
    """The best scores after subtracting from each expert the quantile that gives it its share of the tokens."""

    reads_micro_batch: ClassVar[bool] = True
    sets_bias: ClassVar[bool] = True

    def thresholds(self, scores_TE: "Tensor", top_k: int, tokens: Tokens) -> "Tensor":
        """Return the (1 - K/E) quantile of each expert's scores; all-gathers the scores of the micro-batch."""
        from moefold.parts.choice.quantile.module import quantile_thresholds

        return quantile_thresholds(scores_TE, top_k, tokens.group, tokens.is_token())

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the best experts: above the thresholds in training, by the biased scores in evaluation."""
        if inputs.thresholds_E is None:
            return inputs.best(inputs.ranking_TE)
        return inputs.best(inputs.scores_TE - inputs.thresholds_E)

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield an error if there is no bias for the thresholds, or nothing to balance."""
        part = model.routed
        if part is None:
            return
        if not part.router.expert_bias:
            yield Problem(
                self.key,
                self.kind,
                "stores its thresholds in the expert bias, with which evaluation and generation route, and "
                "model.ffn.moe.router.expert_bias=false",
                "set model.ffn.moe.router.expert_bias=true",
            )
        if part.top_k == part.num_choices:
            yield Problem(
                self.key,
                self.kind,
                f"has nothing to balance: model.ffn.moe.top_k={part.top_k} is every expert",
                f"choose top_k of at most {part.num_experts - 1}, or choice='topk'",
            )

    def formula(self) -> ChoiceFormula:
        """Return the choice by the scores less the thresholds, and the bias by the thresholds of a step."""
        from moefold.parts.choice.quantile.oracle import bias, ranking

        return ChoiceFormula(ranking, bias=bias)
