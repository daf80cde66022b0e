"""Oracle objectives: policy gradients and preference losses as formulas of one token and one sequence at a time.

They share no code with `moefold.objectives`, whose loss functions only say which objective and which constants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.errors import format_list
from moefold.model.loss_function import LossFunction, NextTokenLoss
from moefold.objectives.policy import PolicyGradientLoss
from moefold.objectives.preference import PreferenceLoss
from moefold.objectives.recipe_loss import recipe_loss
from moefold.verify.no_formula import no_formula, unknown_kind
from moefold.verify.read_record import ReadRecord

OracleColumns = Mapping[str, Tensor]
"""Columns of a micro-batch, [B, ...] each; "weights" sum to 1 over the global batch."""
LogProbs = Callable[[float], Tensor]
"""Returns the log-probabilities of the targets of a micro-batch under a temperature, [B, S]."""
OracleObjective = Callable[[LogProbs, OracleColumns], Tensor]
"""Loss of a micro-batch, a 0-dim tensor."""


def recipe_objective(cfg: Config) -> OracleObjective | None:
    """Return the objective of the recipe's [align] section; None for next-token prediction.

    Raises:
        NoFormulaError: the recipe has another loss.
    """
    return objective_of(recipe_loss(cfg))


def objective_of(loss: LossFunction) -> OracleObjective | None:
    """Return the objective of a loss function; None for next-token prediction.

    Raises:
        NoFormulaError: the oracle has no formula for this class of loss functions.
    """
    # A subclass may compute anything.
    if type(loss) is NextTokenLoss:
        return None
    if type(loss) is PreferenceLoss:
        return preference_objective(loss)
    if type(loss) is PolicyGradientLoss:
        return policy_objective(loss)
    no_formula(f"the loss {type(loss).__name__}", "verify/oracle_objectives.py")


def _check_settings(loss: PolicyGradientLoss | PreferenceLoss, reads: ReadRecord) -> None:
    """Refuse a loss with a setting that no formula has read."""
    if unread := [f"{name}={getattr(loss, name)!r}" for name in reads.unread(loss)]:
        no_formula(f"{format_list(unread)} of {type(loss).__name__}", "verify/oracle_objectives.py")


def policy_objective(loss: PolicyGradientLoss) -> OracleObjective:
    """Return the objective of a policy-gradient loss."""
    reads = ReadRecord()
    watched = reads.watch(loss)

    def objective(log_probs: LogProbs, columns: OracleColumns) -> Tensor:
        law = log_probs(watched.temperature)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(law)):
            for position in range(law.shape[1]):
                weight = columns["weights"][row, position]
                if weight != 0:
                    total = total + weight * _token_loss(watched, law[row], columns, row, position)
                    _check_settings(loss, reads)
        return total

    return objective


def _token_loss(loss: PolicyGradientLoss, law: Tensor, columns: OracleColumns, row: int, position: int) -> Tensor:
    """Return policy loss and KL penalty of one token; `law` has the log-probabilities of its row, [S]."""

    def of_row(name: str) -> Tensor:
        return columns[name][row]

    def of_sequence(values: Tensor) -> Tensor:
        return values[of_row("sequence_ids") == of_row("sequence_ids")[position]]

    advantage = of_row("advantages")[position]
    low = 1 - loss.clip_low
    high = 1 + loss.clip_high
    old_name = "trainer_log_probs" if _has_correction(loss) else "old_log_probs"
    match loss.objective:
        case "policy":
            old = law.detach()
            value = -advantage * law[position]
        case "cispo":
            old = of_row(old_name)
            ratio = torch.exp(law[position] - old[position])
            value = -min(max(float(ratio.detach()), low), high) * advantage * law[position]
        case "clip":
            old = of_row(old_name)
            value = _clipped(torch.exp(law[position] - old[position]), advantage, low, high)
        case "sequence":
            old = of_row(old_name)
            ratios = torch.exp(of_sequence(law) - of_sequence(old))
            value = _clipped(ratios.prod() ** (1 / len(ratios)), advantage, low, high)
        case unknown:
            unknown_kind("rl.objective", unknown)
    value = value * _correction(loss, old, of_row("old_log_probs"), of_sequence, position)
    coefficient = loss.kl
    kl_kind = loss.kl_kind
    if not coefficient:
        return value
    ratio_to_reference = torch.exp(of_row("reference_log_probs")[position] - law[position])
    match kl_kind:
        case "k3":
            return value + coefficient * (ratio_to_reference - torch.log(ratio_to_reference) - 1)
        case "k2":
            return value + coefficient * torch.log(ratio_to_reference) ** 2 / 2
        case unknown_kl:
            unknown_kind("rl.kl_kind", unknown_kl)


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return the clipped loss of one token: a positive advantage is clipped from above, a negative one from below."""
    is_clipped = bool(ratio > high) if advantage > 0 else bool(ratio < low)
    bound = high if advantage > 0 else low
    return -bound * advantage if is_clipped else -ratio * advantage


def _has_correction(loss: PolicyGradientLoss) -> bool:
    match loss.correction:
        case "none":
            return False
        case "clamp" | "mask" | "sequence_mask":
            return True
        case unknown:
            unknown_kind("rl.correction", unknown)


def _correction(
    loss: PolicyGradientLoss, trainer: Tensor, sampler: Tensor, of_sequence: Callable[[Tensor], Tensor], position: int
) -> float:
    """Return the factor of one token for a sampler that differs from the trainer; both are rows, [S]."""
    low = loss.correction_low
    high = loss.correction_high
    factor = float(torch.exp(trainer[position] - sampler[position]))
    match loss.correction:
        case "none":
            return 1.0
        case "clamp":
            return min(max(factor, low), high)
        case "mask":
            return factor if low <= factor <= high else 0.0
        case "sequence_mask":
            factors = torch.exp(of_sequence(trainer) - of_sequence(sampler))
            return factor if low <= float(factors.prod() ** (1 / len(factors))) <= high else 0.0
        case unknown:
            unknown_kind("rl.correction", unknown)


@dataclass(frozen=True)
class _Group:
    """Scores of a row of preference data around one pair, or one completion and its mismatched one."""

    first: Tensor
    mismatched: Sequence[Tensor]
    """Scores of the second sequences of all pairs of the row."""
    pair: int
    columns: OracleColumns


@dataclass(frozen=True)
class _PreferenceRule:
    """Formula of a method."""

    of_group: Callable[[_Group], Tensor]
    has_reference: bool = True
    is_per_token: bool = False


def _preference_rule(loss: PreferenceLoss) -> _PreferenceRule:
    beta = loss.beta

    def logistic(group: _Group, gamma: float) -> Tensor:
        difference = group.first - group.mismatched[group.pair]
        return torch.log(1 + torch.exp(gamma - beta * difference))

    def squared(group: _Group) -> Tensor:
        return (group.first - group.mismatched[group.pair] - 0.5 / beta) ** 2

    match loss.method:
        case "dpo":
            return _PreferenceRule(partial(logistic, gamma=0.0))
        case "ipo":
            return _PreferenceRule(squared, is_per_token=True)
        case "simpo":
            return _PreferenceRule(partial(logistic, gamma=loss.gamma), has_reference=False, is_per_token=True)
        case "kto":
            weights = (loss.undesirable_weight, loss.desirable_weight)
            return _PreferenceRule(partial(_kto_loss, beta=beta, weights=weights))
        case unknown:
            unknown_kind("align.method", unknown)


def preference_objective(loss: PreferenceLoss) -> OracleObjective:
    """Return the objective of a preference loss."""
    reads = ReadRecord()
    rule = _preference_rule(reads.watch(loss))
    _check_settings(loss, reads)

    def objective(log_probs: LogProbs, columns: OracleColumns) -> Tensor:
        law = log_probs(1.0)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(law)):
            of_row = {name: values[row] for name, values in columns.items()}
            ids = of_row["sequence_ids"]
            mismatched = [_score(rule, law[row], of_row, number) for number in range(1, int(ids.max()) + 1, 2)]
            for pair in range((int(ids.max()) + 1) // 2):
                share = of_row["weights"][ids == 2 * pair].sum()
                first = _score(rule, law[row], of_row, 2 * pair)
                total = total + share * rule.of_group(_Group(first, mismatched, pair, of_row))
        return total

    return objective


def _score(rule: _PreferenceRule, law: Tensor, columns: OracleColumns, number: int) -> Tensor:
    """Return the score of one sequence of a row, 0-dim."""
    tokens = law[columns["sequence_ids"] == number]
    score = tokens.sum()
    if rule.has_reference:
        score = score - columns["reference_log_probs"][number]
    return score / len(tokens) if rule.is_per_token else score


def _kto_loss(group: _Group, *, beta: float, weights: tuple[float, float]) -> Tensor:
    """Return the loss of one completion; the weights are for undesirable and for desirable ones."""
    z = max(0.0, sum(float(score.detach()) for score in group.mismatched) / len(group.mismatched))
    is_desirable = bool(group.columns["is_desirable"][group.pair])
    sign = 1 if is_desirable else -1
    return weights[is_desirable] * (1 - 1 / (1 + torch.exp(-sign * beta * (group.first - z))))
