"""Oracle objectives: policy gradients and preference losses as formulas of one token and one sequence at a time.

They share no code with `moefold.objectives`: a loss function names its parts and constants, and the formula of each
part is a second implementation.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moefold.config.base.part import Part
from moefold.config.groups.alignment import OraclePairs, PreferenceFormula
from moefold.config.groups.loss import OracleLoss, OracleOutput
from moefold.config.groups.policy import CorrectionFormula, OracleToken
from moefold.model.loss_function import LossFunction
from moefold.objectives.policy_loss import PolicyGradientLoss
from moefold.objectives.preference_loss import PreferenceLoss
from moefold.verify.no_formula import formula_of, no_formula

OracleColumns = Mapping[str, Tensor]


def objective_of(loss: LossFunction) -> OracleLoss:
    """Return the objective of a loss function.

    Raises:
        NoFormulaError: the oracle has no formula for this class of loss functions.
    """
    if isinstance(loss, Part):
        return formula_of(loss)
    # A subclass may compute something else.
    if type(loss) is PreferenceLoss:
        return preference_objective(loss)
    if type(loss) is PolicyGradientLoss:
        return policy_objective(loss)
    no_formula(f"the loss {type(loss).__name__}", "verify/oracle_objectives.py")


def policy_objective(loss: PolicyGradientLoss) -> OracleLoss:
    """Return the objective of a policy-gradient loss."""
    token_loss: Callable[[OracleToken], Tensor] = formula_of(loss.objective)
    factor: CorrectionFormula = formula_of(loss.correction)
    penalty: Callable[[Tensor], Tensor] = formula_of(loss.kl_penalty)

    def objective(output: OracleOutput, columns: OracleColumns) -> Tensor:
        log_probs = output.log_probs(loss.temperature)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(log_probs)):
            for position in range(log_probs.shape[1]):
                weight = columns["weights"][row, position]
                if weight != 0:
                    total = total + weight * token_total(log_probs[row], columns, row, position)
        return total

    def token_total(log_probs: Tensor, columns: OracleColumns, row: int, position: int) -> Tensor:
        """Return policy loss and KL penalty of one token. `log_probs` has the log-probabilities of its row, [S]."""

        def of_row(name: str) -> Tensor:
            return columns[name][row]

        def of_rollout(values: Tensor) -> Tensor:
            return values[of_row("sequence_ids") == of_row("sequence_ids")[position]]

        if not loss.objective.reads_sampler:
            old = log_probs.detach()
        else:
            old = of_row("trainer_log_probs" if loss.correction.corrects else "old_log_probs")
        token = OracleToken(
            log_probs=log_probs,
            old=old,
            advantage=of_row("advantages")[position],
            position=position,
            of_rollout=of_rollout,
        )
        value = token_loss(token)
        if loss.correction.corrects:
            value = value * factor(old - of_row("old_log_probs"), of_rollout, position)
        if loss.kl:
            value = value + loss.kl * penalty(torch.exp(of_row("reference_log_probs")[position] - log_probs[position]))
        return value

    return objective


def preference_objective(loss: PreferenceLoss) -> OracleLoss:
    """Return the objective of a preference loss."""
    formula: PreferenceFormula = formula_of(loss.method)

    def objective(output: OracleOutput, columns: OracleColumns) -> Tensor:
        log_probs = output.log_probs()
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(log_probs)):
            row_data = {name: values[row] for name, values in columns.items()}
            ids = row_data["sequence_ids"]
            seconds = [_score(formula, log_probs[row], row_data, number) for number in range(1, int(ids.max()) + 1, 2)]
            for pair in range((int(ids.max()) + 1) // 2):
                share = row_data["weights"][ids == 2 * pair].sum()
                first = _score(formula, log_probs[row], row_data, 2 * pair)
                total = total + share * formula.loss(OraclePairs(first, seconds, pair, row_data))
        return total

    return objective


def _score(formula: PreferenceFormula, log_probs: Tensor, columns: OracleColumns, number: int) -> Tensor:
    """Return the score of one sequence of a row, 0-dim."""
    tokens = log_probs[columns["sequence_ids"] == number]
    score = tokens.sum()
    if formula.has_reference:
        score = score - columns["reference_log_probs"][number]
    return score / len(tokens) if formula.is_per_token else score
