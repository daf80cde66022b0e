"""Callback that adds to the metrics of a round: the validation loss of the outer weights, and spikes of the loss."""

from moefold.comm.groups import current_world
from moefold.config.model import ModelConfig
from moefold.config.sites import SitesConfig
from moefold.metrics.loss_spike import LossSpike
from moefold.optim.outer import OuterOptimizer
from moefold.parallel.fsdp import reshard_parameters
from moefold.topology.fragments import recipe_fragments, shortest_gap
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext


class SiteEvaluation(Callback):
    """Callback after the evaluation; on steps with a round only.

    `eval_loss` is the loss of the outer weights if the step is evaluated, which costs a second evaluation where the
    site's own weights differ from them. `spike` is the value of the round before.
    """

    def __init__(self, model: ModelConfig, sites: SitesConfig) -> None:
        self._spike = LossSpike(shortest_gap(recipe_fragments(model, sites), sites.every))

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Add to the metrics of the round, if the step has one; collective."""
        self._spike.add(step.result.loss)
        if step.sites is None:
            return
        step.sites["spike"] = self._spike.last
        # A round that began before a resume has fewer metrics.
        if step.sites.get("skipped") is None:
            self._spike.mark()
        if step.eval_loss is not None:
            step.sites["eval_loss"] = self._evaluate(run, step.eval_loss)

    def _evaluate(self, run: TrainingContext, own_loss: float) -> float | None:
        """Return the validation loss of the outer weights; None if a signal interrupted the evaluation."""
        outer = run.training.outer
        assert outer is not None
        if not any(current_world().all_gather_object(self._swap(run, outer))):
            return own_loss
        eval_loss, _ = run.training.evaluate_or_stop(run.data.eval_batches(), lambda: run.stop.flags)
        self._swap(run, outer)
        return eval_loss

    @staticmethod
    def _swap(run: TrainingContext, outer: OuterOptimizer) -> bool:
        reshard_parameters(run.training.model.stages)
        return outer.swap_weights()
