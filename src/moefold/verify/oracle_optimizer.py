"""Frame of the oracle's optimizers: clipping, learning rate and resets around the formula of the part."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moefold.config.base.param_spec import ParamSpec
from moefold.config.chosen import chosen_in
from moefold.config.groups.lr_schedule import LrSchedulePart
from moefold.config.groups.optimizer import OptimizerPart
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.verify.no_formula import formula_of


class OracleOptimizer:
    """Reference optimizer that updates weights in place from unclipped gradients.

    The settings are read here and at the start of a step, so that they count as read in a first step without an update.
    """

    def __init__(self, run: RunConfig, train: TrainConfig) -> None:
        self._run = run
        self._train = train
        self._update = formula_of(chosen_in(train, OptimizerPart))
        self._states: dict[str, dict[str, Tensor]] = {}
        self._steps = 0
        self._moment_updates = 0

    @torch.no_grad()
    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        norm: float,
        specs: Mapping[str, ParamSpec],
    ) -> None:
        """Update all weights once.

        Args:
            weights: the weights, by name.
            gradients: gradients of the trained weights.
            norm: the global gradient norm, used for clipping.
            specs: shapes and groups of the weights.
        """
        train = self._train
        self._steps += 1
        rate = oracle_rate(train, self._run.steps, self._steps)
        clip = min(1.0, train.clip_grad / (norm + 1e-6)) if train.clip_grad else 1.0
        clipped = {name: gradient * clip for name, gradient in gradients.items()}
        self._moment_updates += 1
        for name, weight in weights.items():
            if name not in clipped:
                continue
            state = self._states.setdefault(name, {})
            change = self._update(specs[name], weight, clipped[name], state, self._moment_updates)
            weight.sub_(change(rate) if callable(change) else rate * change)
        if train.reset_moments_every and self._steps % train.reset_moments_every == 0:
            self._states = {}
            self._moment_updates = 0


def oracle_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of a step, counted from 1, of a run of `steps` (docs/recipe.md, train.lr_schedule)."""
    warmup = train.warmup_steps
    now = min(step, steps)
    rate = formula_of(chosen_in(train, LrSchedulePart))
    return train.lr * now / warmup if now <= warmup else float(rate(train.lr, max(1, warmup), now, steps))
