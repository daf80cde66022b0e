"""Module hooks that record the current micro-batch in the flight recorder."""

from typing import Any

from torch import Tensor, nn

from moefold.comm.flight_recorder import FlightRecorder


def install_phase_hooks(stage: nn.Module, recorder: FlightRecorder) -> None:
    """Record when a micro-batch enters the stage, and when its gradient does."""
    counter = _MicroBatchCounter(recorder)
    stage.register_forward_pre_hook(counter.before_forward)
    stage.register_forward_hook(counter.after_forward)


class _MicroBatchCounter:
    """Counts the micro-batches of a step, in order of execution."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._step = -1
        self._count = 0

    def before_forward(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            self._recorder.set_phase("evaluation")
            return
        if self._step != self._recorder.step:
            self._step = self._recorder.step
            self._count = 0
        self._recorder.set_phase(f"forward of micro-batch {self._count}")
        self._count += 1

    def after_forward(self, stage: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            phase = f"backward of micro-batch {self._count - 1}"
            output.register_hook(lambda grad: self._recorder.set_phase(phase))
