"""Losses by the keys of a recipe."""

from typing import Any

from moefold.config.base.part import make_part
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.rl import RLConfig
from moefold.config.sections.train import TrainConfig
from moefold.objectives.policy_loss import PolicyGradientLoss
from moefold.objectives.preference_loss import PreferenceLoss
from moefold.objectives.recipe_loss import policy_loss, recipe_loss


def policy(*, temperature: float = 1.0, **keys: Any) -> PolicyGradientLoss:
    """Return the loss of [rl] with these keys."""
    return policy_loss(RLConfig(**keys), temperature)


def preference(method: str, **settings: Any) -> PreferenceLoss:
    """Return the loss of a method of [align] with these settings."""
    loss = recipe_loss(AlignConfig(method=make_part("alignment", method, **settings)), TrainConfig())
    assert isinstance(loss, PreferenceLoss)
    return loss
