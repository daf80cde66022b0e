"""Callback that chooses the kernels of the run, after the first step."""

from moefold.parallel.kernels.timed import settle_choices
from moefold.train.callbacks.callback import CallbackStage, FinishedStep, StageCallback, TrainingContext


class KernelChoices(StageCallback):
    """Callback that makes all ranks run the fastest measured kernels after the first step, and logs the choice."""

    stage = CallbackStage.KERNELS

    def __init__(self) -> None:
        self._is_settled = False

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Choose once. Collective if kernels are measured."""
        if self._is_settled:
            return
        self._is_settled = True
        groups = context.groups
        message = settle_choices(context.training.model.autotuner, groups.device, groups.world)
        if message and context.log is not None:
            context.log.message(message)
