"""Callback that settles which kernels run, after the first step."""

from moefold.parallel.kernels.timed import settle_choices
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext


class KernelChoices(Callback):
    """Callback after whose first step all ranks run the kernels that were measured to be the fastest; logs which."""

    def __init__(self) -> None:
        self._is_settled = False

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        """Settle once; collective where kernels are measured."""
        if self._is_settled:
            return
        self._is_settled = True
        groups = context.groups
        message = settle_choices(context.training.model.autotuner, groups.device, groups.world)
        if message and context.log is not None:
            context.log.message(message)
