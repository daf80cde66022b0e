"""Oracle objectives: policy gradients and preference losses as formulas of one token and one sequence at a time.

They share no code with `moefold.objectives`, whose loss functions only say which objective and which constants.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moefold.config.schema import Config
from moefold.objectives.policy import PolicyGradientLoss
from moefold.objectives.preference import PreferenceLoss
from moefold.objectives.recipe_loss import recipe_loss

OracleColumns = Mapping[str, Tensor]
"""Columns of a micro-batch, [B, ...] each; "weights" sum to 1 over the global batch."""
LogProbs = Callable[[float], Tensor]
"""Returns the log-probabilities of the targets of a micro-batch under a temperature, [B, S]."""
OracleObjective = Callable[[LogProbs, OracleColumns], Tensor]
"""Loss of a micro-batch, a 0-dim tensor."""


def recipe_objective(cfg: Config) -> OracleObjective | None:
    """Return the objective of the recipe's [align] section; None for next-token prediction."""
    loss = recipe_loss(cfg)
    return preference_objective(loss) if isinstance(loss, PreferenceLoss) else None


def policy_objective(loss: PolicyGradientLoss) -> OracleObjective:
    """Return the objective of a policy-gradient loss."""

    def objective(log_probs: LogProbs, columns: OracleColumns) -> Tensor:
        law = log_probs(loss.temperature)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(law)):
            for position in range(law.shape[1]):
                weight = columns["weights"][row, position]
                if weight != 0:
                    total = total + weight * _token_loss(loss, law[row], columns, row, position)
        return total

    return objective


def _token_loss(loss: PolicyGradientLoss, law: Tensor, columns: OracleColumns, row: int, position: int) -> Tensor:
    """Return policy loss and KL penalty of one token; `law` has the log-probabilities of its row, [S]."""

    def of_row(name: str) -> Tensor:
        return columns[name][row]

    def of_sequence(values: Tensor) -> Tensor:
        return values[of_row("sequence_ids") == of_row("sequence_ids")[position]]

    old = "old_log_probs"
    if loss.correction != "none" and loss.objective != "policy":
        old = "trainer_log_probs"
    advantage = of_row("advantages")[position]
    low = 1 - loss.clip_low
    high = 1 + loss.clip_high
    if loss.objective == "policy":
        value = -advantage * law[position]
    elif loss.objective == "cispo":
        ratio = torch.exp(law[position] - of_row(old)[position])
        value = -min(max(float(ratio.detach()), low), high) * advantage * law[position]
    else:
        if loss.objective == "clip":
            ratio = torch.exp(law[position] - of_row(old)[position])
        else:
            ratios = torch.exp(of_sequence(law) - of_sequence(of_row(old)))
            ratio = ratios.prod() ** (1 / len(ratios))
        # A positive advantage is clipped from above, a negative one from below.
        is_clipped = bool(ratio > high) if advantage > 0 else bool(ratio < low)
        bound = high if advantage > 0 else low
        value = -bound * advantage if is_clipped else -ratio * advantage
    trainer = law.detach() if loss.objective == "policy" else of_row(old)
    value = value * _correction(loss, trainer, of_row("old_log_probs"), of_sequence, position)
    if loss.kl:
        ratio_to_reference = torch.exp(of_row("reference_log_probs")[position] - law[position])
        k3 = ratio_to_reference - torch.log(ratio_to_reference) - 1
        k2 = torch.log(ratio_to_reference) ** 2 / 2
        value = value + loss.kl * (k3 if loss.kl_kind == "k3" else k2)
    return value


def _correction(
    loss: PolicyGradientLoss, trainer: Tensor, sampler: Tensor, of_sequence: Callable[[Tensor], Tensor], position: int
) -> float:
    """Return the factor of one token for a sampler that differs from the trainer; both are rows, [S]."""
    if loss.correction == "none":
        return 1.0
    factor = float(torch.exp(trainer[position] - sampler[position]))
    if loss.correction == "clamp":
        return min(max(factor, loss.correction_low), loss.correction_high)
    judged = factor
    if loss.correction == "sequence_mask":
        factors = torch.exp(of_sequence(trainer) - of_sequence(sampler))
        judged = float(factors.prod() ** (1 / len(factors)))
    return factor if loss.correction_low <= judged <= loss.correction_high else 0.0


def preference_objective(loss: PreferenceLoss) -> OracleObjective:
    """Return the objective of a preference loss."""

    def objective(log_probs: LogProbs, columns: OracleColumns) -> Tensor:
        law = log_probs(1.0)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(law)):
            of_row = {name: values[row] for name, values in columns.items()}
            ids = of_row["sequence_ids"]
            mismatched = [_score(loss, law[row], of_row, number) for number in range(1, int(ids.max()) + 1, 2)]
            for pair in range((int(ids.max()) + 1) // 2):
                share = of_row["weights"][ids == 2 * pair].sum()
                first = _score(loss, law[row], of_row, 2 * pair)
                if loss.method == "kto":
                    z = max(0.0, sum(float(score.detach()) for score in mismatched) / len(mismatched))
                    total = total + share * _kto_loss(loss, first, z, bool(of_row["is_desirable"][pair]))
                else:
                    total = total + share * _pair_loss(loss, first - mismatched[pair])
        return total

    return objective


def _score(loss: PreferenceLoss, law: Tensor, columns: OracleColumns, number: int) -> Tensor:
    """Return the score of one sequence of a row, 0-dim."""
    tokens = law[columns["sequence_ids"] == number]
    score = tokens.sum()
    if loss.method != "simpo":
        score = score - columns["reference_log_probs"][number]
    return score / len(tokens) if loss.method in ("ipo", "simpo") else score


def _pair_loss(loss: PreferenceLoss, difference: Tensor) -> Tensor:
    if loss.method == "ipo":
        return (difference - 0.5 / loss.beta) ** 2
    margin = loss.beta * difference - (loss.gamma if loss.method == "simpo" else 0)
    return torch.log(1 + torch.exp(-margin))


def _kto_loss(loss: PreferenceLoss, score: Tensor, z: float, is_desirable: bool) -> Tensor:
    if is_desirable:
        return loss.desirable_weight * (1 - 1 / (1 + torch.exp(-loss.beta * (score - z))))
    return loss.undesirable_weight * (1 - 1 / (1 + torch.exp(-loss.beta * (z - score))))
