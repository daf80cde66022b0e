"""Callback that writes the routing of traced steps."""

from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext


class RoutingTraceSaving(Callback):
    """Callback that gathers the recorded routing and writes it on rank 0 (moe.trace_every)."""

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Save the routing of the step if it was traced; collective."""
        buffer = run.training.router_replay
        if buffer is not None and buffer.is_due(step.number):
            buffer.save(step.number, None if run.log is None else run.log.trace_writer)
