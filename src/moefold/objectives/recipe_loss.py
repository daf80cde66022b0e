"""The loss function that a recipe asks for."""

from typing import TYPE_CHECKING

from moefold.config.base.part_registry import find_group
from moefold.config.chosen import chosen_in
from moefold.config.groups.alignment import AlignmentPart
from moefold.config.groups.loss import LossPart
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.model.loss_function import LossFunction

if TYPE_CHECKING:
    from moefold.objectives.policy_loss import PolicyGradientLoss


def recipe_loss(align: AlignConfig, train: TrainConfig) -> LossFunction:
    """Return the loss of the [align] section, or `train.loss` if that section has no loss."""
    method = chosen_in(align, AlignmentPart)
    if method.preference is None:
        return chosen_in(train, LossPart)
    from moefold.objectives.preference_loss import PreferenceLoss

    return PreferenceLoss(method=method.preference)


def policy_loss(rl: RLConfig, temperature: float = 1.0) -> "PolicyGradientLoss":
    """Return the loss of reinforcement learning at rollout.temperature."""
    from moefold.config.groups.policy import CorrectionPart, KlPart, ObjectivePart
    from moefold.objectives.policy_loss import PolicyGradientLoss

    return PolicyGradientLoss(
        objective=chosen_in(rl, ObjectivePart),
        correction=chosen_in(rl, CorrectionPart),
        kl=rl.kl,
        kl_penalty=chosen_in(rl, KlPart),
        temperature=temperature,
    )


def loss_keys() -> frozenset[str]:
    """Return the recipe keys that only the loss of a recipe reads, or the loss of its rollouts."""
    return frozenset(find_group(name).key for name in ("loss", "objective", "correction", "kl"))


def loss_columns(loss: LossFunction) -> tuple[str, ...]:
    """Return the columns of a batch that a loss declares to read."""
    return tuple(getattr(loss, "columns", ()))


ROLLOUT_COLUMNS = (
    "labels",
    "weights",
    "advantages",
    "old_log_probs",
    "trainer_log_probs",
    "reference_log_probs",
    "sequence_ids",
)
"""Columns that a batch of rollouts may have."""


def rollout_loss_problem(loss: LossFunction, rl: RLConfig) -> str:
    """Return the reason why a loss of a program cannot train on rollouts, or empty if it can."""
    columns = loss_columns(loss)
    if not columns:
        return f"has no attribute `columns`: name the columns that it reads, of {', '.join(ROLLOUT_COLUMNS)}"
    if unknown := [name for name in columns if name not in ROLLOUT_COLUMNS]:
        return f"reads the columns {unknown}; rollouts have {', '.join(ROLLOUT_COLUMNS)}"
    if "reference_log_probs" in columns and not rl.kl:
        return "reads the column 'reference_log_probs', and rl.kl=0.0 has no reference model; set rl.kl"
    return ""
