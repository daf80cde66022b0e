"""Callback that reports ranks that have been slow for several steps."""

import socket

from moefold.comm.groups import current_world
from moefold.metrics.rank_times import Stragglers
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext


class StragglerDetection(Callback):
    """Callback that logs slow ranks with the names of their hosts (faults.straggler_factor)."""

    def __init__(self) -> None:
        self._stragglers: Stragglers | None = None

    def on_start(self, run: TrainingContext) -> None:
        """Gather the host names of all ranks; collective."""
        factor = run.cfg.faults.straggler_factor
        layout = run.groups.layout
        if factor and layout.world_size > 1:
            hosts = current_world().all_gather_object(socket.gethostname())
            self._stragglers = Stragglers(factor, layout.attention.groups("dp", "cp", "tp"), hosts)

    def after_step(self, run: TrainingContext, step: FinishedStep) -> None:
        """Log the ranks that are slow after this step, on rank 0."""
        if run.log is not None and self._stragglers is not None:
            run.log.log_stragglers(step.number, self._stragglers.update(step.result.rank_times))
