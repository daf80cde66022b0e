"""Evaluation of the outer weights of a run with sites, and the spike of the loss after a round."""

from collections import deque
from dataclasses import replace

from moefold.comm.groups import current_world
from moefold.config.model import ModelConfig
from moefold.config.sections.sites import SitesConfig
from moefold.optim.outer import OuterOptimizer
from moefold.parallel.fsdp import reshard_parameters
from moefold.topology.fragments import recipe_fragments, shortest_gap
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.sites.transfer import outer_of


class SiteEvaluation(StageCallback):
    """Callback that adds to the metrics of steps with a round.

    `eval_loss` is the loss of the outer weights if the step is evaluated, which costs a second evaluation where the
    site's own weights differ from them. `spike` is the value of the round before.
    """

    stage = CallbackStage.OUTER_EVALUATION

    def __init__(self, model: ModelConfig, sites: SitesConfig) -> None:
        self._spike = LossSpike(shortest_gap(recipe_fragments(model, sites), sites.every))

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Add to the metrics of the round, if the step has one. It is collective."""
        self._spike.add(step.result.loss)
        if step.sites is None:
            return step
        sites = step.sites | {"spike": self._spike.last}
        # A round that began before a resume has fewer metrics.
        if sites.get("skipped") is None:
            self._spike.mark()
        if step.eval_loss is not None:
            sites["eval_loss"] = self._evaluate(context, step.eval_loss)
        return replace(step, sites=sites)

    def _evaluate(self, context: TrainingContext, own_loss: float) -> float | None:
        """Return the validation loss of the outer weights, or None if a signal interrupted the evaluation."""
        outer = outer_of(context)
        if not any(current_world().all_gather_object(self._swap(context, outer))):
            return own_loss
        eval_loss, _ = context.training.evaluate_or_stop(context.data.eval_batches(), lambda: context.stop.flags)
        self._swap(context, outer)
        return eval_loss

    @staticmethod
    def _swap(context: TrainingContext, outer: OuterOptimizer) -> bool:
        reshard_parameters(context.training.model.stages)
        return outer.swap_weights()


STEPS = 5
"""Most steps before and after a round whose mean losses are compared."""


class LossSpike:
    """Mean loss of the steps after a round minus the mean of the steps before. `last` is the value of the last round.

    Args:
        gap: minimum number of steps between two rounds. No more steps are compared.
    """

    def __init__(self, gap: int) -> None:
        self._num_steps = min(STEPS, gap)
        self._losses: deque[float] = deque(maxlen=self._num_steps)
        self._before: float | None = None
        self._num_after = 0
        self.last: float | None = None
        """Value of the last round. None before the first round, or if fewer steps lie before or after the round."""

    def add(self, loss: float) -> None:
        """Add the loss of a step, computed with the weights before it."""
        self._losses.append(loss)
        self._num_after += 1
        if self._before is not None and self._num_after == self._num_steps:
            self.last = self._mean() - self._before

    def mark(self) -> None:
        """Mark that a round follows the last step."""
        self._before = self._mean() if len(self._losses) == self._num_steps else None
        self._num_after = 0
        self.last = None

    def _mean(self) -> float:
        return sum(self._losses) / len(self._losses)
