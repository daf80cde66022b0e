"""The loss function that a recipe asks for."""

from typing import cast

from moefold.config.align import PREFERENCE_METHODS
from moefold.config.schema import Config
from moefold.model.loss_function import LossFunction, NextTokenLoss
from moefold.objectives.preference import PreferenceLoss, PreferenceMethod


def recipe_loss(cfg: Config) -> LossFunction:
    """Return the loss of the recipe's [align] section; next-token prediction if it asks for none."""
    align = cfg.align
    if align.method not in PREFERENCE_METHODS:
        return NextTokenLoss()
    return PreferenceLoss(
        method=cast(PreferenceMethod, align.method),
        beta=align.beta,
        gamma=align.gamma,
        desirable_weight=align.desirable_weight,
        undesirable_weight=align.undesirable_weight,
    )
