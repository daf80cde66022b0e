"""Callback that evaluates the model on the validation data."""

from dataclasses import replace
from signal import Signals

from moefold.comm.groups import current_world
from moefold.config.sections.train import TrainConfig
from moefold.errors import SIGNAL_STATUS
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext
from moefold.train.position import is_evaluation_due
from moefold.train.signals import SIGNALS


class PeriodicEvaluation(StageCallback):
    """Callback that computes the validation loss every train.eval_every steps and after the last step.

    Args:
        train: train.eval_every (0: never) and train.eval_at_start.
    """

    stage = CallbackStage.EVALUATION

    def __init__(self, train: TrainConfig, last_step: int) -> None:
        self._every = train.eval_every
        self._at_start = train.eval_at_start
        self._last_step = last_step

    def on_start(self, context: TrainingContext) -> None:
        """Evaluate before the first step, or do an evaluation that a signal prevented earlier. It is collective.

        Sets the exit status of the run if another signal came.
        """
        step = context.position.step
        is_first = self._at_start and step == 0
        is_missing = context.log is not None and context.log.writer.lacks_evaluation(step)
        is_made_up = context.is_resumed and self._is_due(step) and any(current_world().all_gather_object(is_missing))
        if self._at_start and step > 0 and context.log is not None and not context.log.writer.has_step(0):
            context.log.message(
                "train.eval_at_start: the run has begun without it, so nothing is evaluated before its start"
            )
        if not is_first and not is_made_up:
            return
        for layer in context.training.model.moe_layers().values():
            layer.begin_step(step)
        eval_loss, raised = _evaluate(context)
        if context.log is not None and eval_loss is not None:
            context.log.writer.add_evaluation(step, eval_loss)
            later = "made up after a signal; the checkpoint of this step lacks it, so RUN/best does not consider it"
            occasion = "before the first step" if is_first else later
            context.log.message(f"step {step}: eval {eval_loss:.4f}, {occasion}")
        if raised and eval_loss is None:
            context.status = SIGNAL_STATUS + raised[0]

    def complete(self, context: TrainingContext, step: FinishedStep) -> FinishedStep:
        """Evaluate if an evaluation is due and no signal stops the run. It is collective."""
        # A site that took over the state of another site is at a later step than its own training.
        if not self._is_due(context.position.step):
            return step
        if step.signals:
            return replace(step, is_evaluated=False)
        eval_loss, signals = _evaluate(context)
        return replace(step, eval_loss=eval_loss, signals=signals, is_evaluated=eval_loss is not None or not signals)

    def _is_due(self, step: int) -> bool:
        return is_evaluation_due(self._every, step, self._last_step)


def _evaluate(context: TrainingContext) -> tuple[float | None, tuple[Signals, ...]]:
    """Return the validation loss, and the signals received during the evaluation. It is collective.

    The loss is None if a signal interrupted the evaluation, or if all validation samples are lost.
    """
    batches = context.data.eval_batches()
    context.log_dropped_files(context.position.step)
    if not batches:
        return None, ()
    eval_loss, flags = context.training.evaluate_or_stop(batches, lambda: context.stop.flags)
    return eval_loss, tuple(number for number, count in zip(SIGNALS, flags, strict=bool(flags)) if count)
