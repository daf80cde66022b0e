"""Choices of experts. The functions of formulas share no code with the trainer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from moefold.config.base.field import SHARE, MaxMagnitude, at_least
from moefold.config.groups.router import ChoiceFormula, ChoiceInputs, ChoicePart, OracleScores, TokenGroup, Tokens
from moefold.message_text import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from moefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BestScoresChoice(ChoicePart, kind="topk"):
    """The experts with the best scores."""

    scores_decide: ClassVar[bool] = True

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Choose the experts with the highest choice values."""
        return inputs.best(inputs.ranking_TE)

    def formula(self) -> ChoiceFormula:
        """Return the choice by the biased scores."""
        return ChoiceFormula(lambda scores: scores.biased, has_aux_loss=True)


@dataclass(frozen=True, kw_only=True)
class RoundRobinChoice(ChoicePart, kind="round_robin"):
    """The experts one after another: a perfectly even load, for benchmarks."""

    is_forced: ClassVar[bool] = True

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the next experts of each token."""
        return assign_in_turn(inputs.tokens.global_index(), inputs.top_k, inputs.logits_TE.shape[1])

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for settings of scores, which this choice does not read."""
        return _no_bias_problems(model, self.kind, "reads no score")

    def formula(self) -> ChoiceFormula:
        """Return the experts of a token by counting."""

        def forced(token: int, top_k: int, num_experts: int) -> list[int]:
            return [(token * top_k + k) % num_experts for k in range(top_k)]

        return ChoiceFormula(lambda scores: scores.biased, forced=forced)


@dataclass(frozen=True, kw_only=True)
class SkewedChoice(ChoicePart, kind="skewed"):
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
        yield from _no_bias_problems(model, self.kind, "reads no score")
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


def assign_in_turn(index_T: "Tensor", top_k: int, num_experts: int, *, first: int = 0) -> "Tensor":
    """Assign the experts cyclically to the tokens, starting at `first`: an even load. int64 [T, K]."""
    import torch

    counter_TK = index_T.unsqueeze(1) * top_k + torch.arange(top_k, device=index_T.device)
    return first + counter_TK % (num_experts - first)


@dataclass(frozen=True, kw_only=True)
class QuantileChoice(ChoicePart, kind="quantile"):
    """The best scores after subtracting from each expert the quantile that gives it its share of the tokens."""

    reads_micro_batch: ClassVar[bool] = True
    sets_bias: ClassVar[bool] = True

    def thresholds(self, scores_TE: "Tensor", top_k: int, tokens: Tokens) -> "Tensor":
        """Return the (1 - K/E) quantile of each expert's scores, by an all-gather over the micro-batch."""
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
        return ChoiceFormula(lambda scores: scores.scores - _oracle_thresholds(scores), bias=_oracle_bias)


def quantile_thresholds(
    scores_TE: "Tensor", top_k: int, group: TokenGroup, is_token_T: "Tensor | None" = None
) -> "Tensor":
    """Compute the (1 - K/E) quantile of each expert's scores: a share K/E of the micro-batch's tokens exceeds it.

    Interpolates linearly between neighbouring scores. All-gathers the scores of the micro-batch.

    Args:
        scores_TE: scores of this rank's tokens.
        top_k: K.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are not padding, bool [T]. None: all.

    Returns:
        [E], or 0 if the micro-batch has only padding.
    """
    if is_token_T is not None:
        return _masked_quantiles(group.gather(scores_TE.masked_fill(~is_token_T.unsqueeze(1), math.inf)), top_k)
    sorted_TE = group.gather(scores_TE).sort(0).values
    num_tokens, num_experts = sorted_TE.shape
    position = (1 - top_k / num_experts) * (num_tokens - 1)
    below = math.floor(position)
    above = min(below + 1, num_tokens - 1)
    return sorted_TE[below].lerp(sorted_TE[above], position - below)


def _masked_quantiles(scores_TE: "Tensor", top_k: int) -> "Tensor":
    """Compute `quantile_thresholds` of scores that are infinite for padding. The host does not wait."""
    import torch

    sorted_TE = scores_TE.sort(0).values
    num_experts = sorted_TE.shape[1]
    last = sorted_TE[:, 0].isfinite().sum() - 1
    position = (1 - top_k / num_experts) * last.clamp(min=0).double()
    below = position.floor()
    rows = torch.stack((below, torch.minimum(below + 1, last.double()))).clamp(min=0).long()
    ends_2E = sorted_TE[rows]
    thresholds_E = ends_2E[0].lerp(ends_2E[1], (position - below).to(sorted_TE.dtype))
    return torch.where(last >= 0, thresholds_E, 0.0)


def _oracle_bias(batches: list[OracleScores]) -> "Tensor":
    """Return the mean of the thresholds over the tokens of a step, with the other sign, [E]."""
    import torch

    num_tokens = [int(scores.is_token.sum()) for scores in batches]
    thresholds = [count * _oracle_thresholds(scores) for count, scores in zip(num_tokens, batches, strict=True)]
    return -(torch.stack(thresholds).sum(0) / sum(num_tokens))


def _oracle_thresholds(scores: OracleScores) -> "Tensor":
    """Return the (1 - K/E) quantile of each expert's scores, [E], or 0 if the micro-batch has only padding."""
    import torch

    num_experts = scores.scores.shape[-1]
    if not scores.is_token.any():
        return torch.zeros(num_experts, dtype=torch.float64)
    return torch.quantile(scores.scores[scores.is_token], 1 - scores.top_k / num_experts, dim=0)


@dataclass(frozen=True, kw_only=True)
class SinkhornChoice(ChoicePart, kind="sinkhorn"):
    """The best logits after offsets that balance the experts, in training. In evaluation the best logits."""

    reads_micro_batch: ClassVar[bool] = True
    iterations: Annotated[int, at_least(1), MaxMagnitude(10_000)] = 20
    """Iterations (row and column scaling) on the logits of a micro-batch."""

    def select(self, inputs: ChoiceInputs) -> "Tensor":
        """Return the best experts by logits and offsets. Training all-gathers the logits of the micro-batch."""
        if not inputs.is_training:
            return inputs.largest(inputs.logits_TE)
        tokens = inputs.tokens
        offsets_E = sinkhorn_offsets(inputs.logits_TE, self.iterations, tokens.group, tokens.is_token())
        return inputs.largest(inputs.logits_TE + offsets_E)

    def check(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield errors for settings that would also balance the experts."""
        return _no_bias_problems(model, self.kind, "balances the experts by itself")

    def formula(self) -> ChoiceFormula:
        """Return the choice by a matrix whose rows and columns are scaled."""
        return ChoiceFormula(partial(_oracle_sinkhorn, self.iterations))


def sinkhorn_offsets(
    logits_TE: "Tensor", iterations: int, group: TokenGroup, is_token_T: "Tensor | None" = None
) -> "Tensor":
    """Compute the Sinkhorn offsets of each expert's logits that balance the load.

    Runs the iterations of Sinkhorn and Knopp on the matrix exp(logits) of the micro-batch, in logarithms: rows first,
    then columns. The scale of a row does not change its token's choice, so only the offsets of the columns are needed.
    All-gathers the logits of the micro-batch.

    Args:
        logits_TE: logits of this rank's tokens.
        group: the ranks that share the micro-batch.
        is_token_T: rows that are not padding, bool [T]. None: all. Padding has no row in the matrix.

    Returns:
        [E], or 0 if the micro-batch has only padding.
    """
    import torch

    whole_TE = group.gather(
        logits_TE if is_token_T is None else logits_TE.masked_fill(~is_token_T.unsqueeze(1), -math.inf)
    )
    is_absent_T1 = None
    if is_token_T is not None:
        is_absent_T1 = whole_TE[:, :1].isneginf()
        whole_TE = whole_TE.masked_fill(is_absent_T1, 0.0)
    offsets_E = torch.zeros_like(whole_TE[0])
    for _ in range(iterations):
        rows_T1 = (whole_TE + offsets_E).logsumexp(1, keepdim=True)
        balanced_TE = whole_TE - rows_T1
        if is_absent_T1 is not None:
            balanced_TE.masked_fill_(is_absent_T1, -math.inf)
        offsets_E = -balanced_TE.logsumexp(0)
    return offsets_E if is_absent_T1 is None else torch.where(is_absent_T1.all(), 0.0, offsets_E)


def _oracle_sinkhorn(iterations: int, scores: OracleScores) -> "Tensor":
    """Return exp(logits) with its columns scaled by iterations over rows and columns, [B, S, E], 0 for padding."""
    import torch

    matrix = torch.exp(scores.logits[scores.is_token])
    columns = torch.ones(matrix.shape[1], dtype=torch.float64)
    for _ in range(iterations):
        rows = 1 / (matrix @ columns)
        columns = 1 / (matrix.T @ rows)
    values = torch.zeros_like(scores.logits)
    values[scores.is_token] = matrix * columns
    return values


def _no_bias_problems(model: "ModelConfig", choice: str, reason: str) -> Iterator[Problem]:
    """Yield the settings of scores that contradict a choice of experts, which, for example, "reads no score"."""
    if model.routed is None:
        return
    router = model.routed.router
    rule = f"contradicts moe.choice={choice!r}, which {reason}"
    if router.expert_bias:
        yield Problem("model.ffn.moe.router.expert_bias", True, rule, "choose expert_bias=false, or choice='topk'")
    if router.num_groups > 1:
        way_out = "leave num_groups and top_groups out, or choose choice='topk'"
        yield Problem("model.ffn.moe.router.num_groups", router.num_groups, rule, way_out)
